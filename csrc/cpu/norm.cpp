#include "cpu/norm.h"

#include <algorithm>
#include <cmath>

#include "cpu/registers/floats.h"
#include "cpu/registers/tile.h"
#include "cpu/thread_pool.h"

namespace embert::cpu {
namespace {

constexpr int kMaxSerial = 1 << 15;  // elements for which one thread suffices: 8 µs on Zen 4

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

}  // namespace

void normalize(const float* x, int rows, int columns, const float* gamma, const float* beta, float epsilon, float* y,
               int threads) {
  const long elements = long(rows) * columns;
  const int pieces = static_cast<int>(std::max(1l, std::min(long(rows), elements / kMaxSerial)));
  ThreadPool::shared().run(threads, pieces, [&](int piece) {
    const TileRows range = tile_rows(rows, pieces, piece);
    for (int row = range.first; row < range.first + range.count; ++row) {
      const std::ptrdiff_t column = std::ptrdiff_t(row) * columns;
      normalize_row(x + column, columns, gamma, beta, epsilon, y + column);
    }
  });
}

}  // namespace embert::cpu
