#include "cpu/row_ops.h"

#include <algorithm>
#include <cmath>

#include "cpu/gemm/tile.h"
#include "cpu/simd.h"
#include "cpu/thread_pool.h"

namespace embert::cpu {
namespace {

template <typename Function>
inline float sum_of(int columns, const Function& function) {
  Floats sums = _mm512_setzero_ps();
  for (int column = 0; column < columns; column += kLanes) {
    const __mmask16 mask = first_lanes(columns - column);
    sums = _mm512_mask_add_ps(sums, mask, sums, function(column, mask));
  }
  return _mm512_reduce_add_ps(sums);
}

void normalize_row(const float* x, int columns, const float* gamma, const float* beta, float epsilon, float* y) {
  const auto load = [&](int column, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, x + column); };
  const float mean = beta ? sum_of(columns, load) / columns : 0.0f;
  const Floats means = _mm512_set1_ps(mean);
  const float squares = sum_of(columns, [&](int column, __mmask16 mask) {
    const Floats centered = _mm512_sub_ps(load(column, mask), means);
    return _mm512_mul_ps(centered, centered);
  });
  const Floats scale = _mm512_set1_ps(1.0f / std::sqrt(squares / columns + epsilon));
  for (int column = 0; column < columns; column += kLanes) {
    const __mmask16 mask = first_lanes(columns - column);
    Floats value = _mm512_mul_ps(_mm512_sub_ps(load(column, mask), means), scale);
    value = _mm512_mul_ps(value, _mm512_maskz_loadu_ps(mask, gamma + column));
    if (beta) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, beta + column));
    _mm512_mask_storeu_ps(y + column, mask, value);
  }
}

bool in(std::int64_t row, const Table& table) {
  return row >= 0 && row < table.rows;
}

}  // namespace

void normalize(const float* x, int rows, int columns, const float* gamma, const float* beta, float epsilon, float* y,
               int threads) {
  for_rows(rows, columns, threads, [&](int row) {
    const std::ptrdiff_t column = std::ptrdiff_t(row) * columns;
    normalize_row(x + column, columns, gamma, beta, epsilon, y + column);
  });
}

bool embed(const std::int64_t* ids, const std::int64_t* position_ids, int tokens, const Table& words,
           const Table& positions, int columns, const float* gamma, const float* beta, float epsilon, float* y,
           int threads) {
  for (int token = 0; token < tokens; ++token) {
    if (!in(ids[token], words) || !in(position_ids[token], positions)) return false;
  }
  for_rows(tokens, columns, threads, [&](int token) {
    const float* const word = words.first + ids[token] * columns;
    const float* const position = positions.first + position_ids[token] * columns;
    float* const row = y + std::ptrdiff_t(token) * columns;
    for (int column = 0; column < columns; column += kLanes) {
      const __mmask16 mask = first_lanes(columns - column);
      const Floats sum =
          _mm512_add_ps(_mm512_maskz_loadu_ps(mask, word + column), _mm512_maskz_loadu_ps(mask, position + column));
      _mm512_mask_storeu_ps(row + column, mask, sum);
    }
    normalize_row(row, columns, gamma, beta, epsilon, row);
  });
  return true;
}

void mean(const float* x, int sequences, int length, int columns, float* y, int threads) {
  const std::int64_t elements = std::int64_t{sequences} * length * columns;
  if (elements <= kMaxSerialElements) threads = 1;
  ThreadPool::shared().run(threads, sequences, [&](int sequence) {
    const float* const rows = x + std::ptrdiff_t(sequence) * length * columns;
    for (int column = 0; column < columns; column += kLanes) {
      const __mmask16 mask = first_lanes(columns - column);
      Floats sum = _mm512_setzero_ps();
      for (int first = 0; first < length; first += kPartialDepth) {
        Floats partial = _mm512_setzero_ps();
        for (int row = first; row < std::min(length, first + kPartialDepth); ++row) {
          partial = _mm512_add_ps(partial, _mm512_maskz_loadu_ps(mask, rows + std::ptrdiff_t(row) * columns + column));
        }
        sum = _mm512_add_ps(sum, partial);
      }
      const Floats means = _mm512_div_ps(sum, _mm512_set1_ps(static_cast<float>(length)));
      _mm512_mask_storeu_ps(y + std::ptrdiff_t(sequence) * columns + column, mask, means);
    }
  });
}

}  // namespace embert::cpu
