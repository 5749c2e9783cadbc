#include "cpu/rows.h"

#include <algorithm>

#include "cpu/norm.h"
#include "cpu/registers/floats.h"
#include "cpu/registers/tile.h"
#include "cpu/thread_pool.h"

namespace embert::cpu {
namespace {

constexpr int kMaxSerial = 1 << 15;  // elements for which one thread suffices

bool in(std::int64_t row, const Table& table) {
  return row >= 0 && row < table.rows;
}

}  // namespace

bool embed(const std::int64_t* ids, const std::int64_t* places, int tokens, const Table& words, const Table& positions,
           int columns, const float* gamma, const float* beta, float epsilon, float* y, int threads) {
  for (int token = 0; token < tokens; ++token) {
    if (!in(ids[token], words) || !in(places[token], positions)) return false;
  }
  const std::int64_t elements = std::int64_t{tokens} * columns;
  const int pieces = static_cast<int>(std::clamp<std::int64_t>(elements / kMaxSerial, 1, std::max(tokens, 1)));
  ThreadPool::shared().run(threads, pieces, [&](int piece) {
    const TileRows range = tile_rows(tokens, pieces, piece);
    for (int token = range.first; token < range.first + range.count; ++token) {
      const float* const word = words.first + ids[token] * columns;
      const float* const place = positions.first + places[token] * columns;
      float* const row = y + std::ptrdiff_t(token) * columns;
      for (int column = 0; column < columns; column += kLanes) {
        const __mmask16 mask = first_lanes(columns - column);
        const Floats sum =
            _mm512_add_ps(_mm512_maskz_loadu_ps(mask, word + column), _mm512_maskz_loadu_ps(mask, place + column));
        _mm512_mask_storeu_ps(row + column, mask, sum);
      }
      normalize(row, 1, columns, gamma, beta, epsilon, row, 1);
    }
  });
  return true;
}

void mean(const float* x, int sequences, int length, int columns, float* y, int threads) {
  const std::int64_t elements = std::int64_t{sequences} * length * columns;
  if (elements <= kMaxSerial) threads = 1;
  ThreadPool::shared().run(threads, sequences, [&](int sequence) {
    const float* const rows = x + std::ptrdiff_t(sequence) * length * columns;
    for (int column = 0; column < columns; column += kLanes) {
      const __mmask16 mask = first_lanes(columns - column);
      Floats sum = _mm512_setzero_ps();
      for (int first = 0; first < length; first += kRun) {
        Floats run = _mm512_setzero_ps();
        for (int row = first; row < std::min(length, first + kRun); ++row) {
          run = _mm512_add_ps(run, _mm512_maskz_loadu_ps(mask, rows + std::ptrdiff_t(row) * columns + column));
        }
        sum = _mm512_add_ps(sum, run);
      }
      const Floats means = _mm512_div_ps(sum, _mm512_set1_ps(static_cast<float>(length)));
      _mm512_mask_storeu_ps(y + std::ptrdiff_t(sequence) * columns + column, mask, means);
    }
  });
}

}  // namespace embert::cpu
