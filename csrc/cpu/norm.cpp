#include "cpu/norm.h"

#include <algorithm>
#include <cmath>

#include "cpu/registers/floats.h"
#include "cpu/registers/tile.h"
#include "cpu/thread_pool.h"

namespace embert::cpu {
namespace {

constexpr int kAlone = 1 << 15;  // elements for which one thread suffices: 8 µs on Zen 4

template <typename Function>
inline float sum_of(int columns, const Function& function) {
  Floats sums = _mm512_setzero_ps();
  for (int at = 0; at < columns; at += kLanes) {
    const __mmask16 mask = first_lanes(columns - at);
    sums = _mm512_mask_add_ps(sums, mask, sums, function(at, mask));
  }
  return _mm512_reduce_add_ps(sums);
}

void normalize_row(const float* x, int columns, const float* gamma, const float* beta, float epsilon, float* y) {
  const auto loaded = [&](int at, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, x + at); };
  const float mean = beta ? sum_of(columns, loaded) / columns : 0.0f;
  const Floats means = _mm512_set1_ps(mean);
  const float squares = sum_of(columns, [&](int at, __mmask16 mask) {
    const Floats apart = _mm512_sub_ps(loaded(at, mask), means);
    return _mm512_mul_ps(apart, apart);
  });
  const Floats scale = _mm512_set1_ps(1.0f / std::sqrt(squares / columns + epsilon));
  for (int at = 0; at < columns; at += kLanes) {
    const __mmask16 mask = first_lanes(columns - at);
    Floats value = _mm512_mul_ps(_mm512_sub_ps(loaded(at, mask), means), scale);
    value = _mm512_mul_ps(value, _mm512_maskz_loadu_ps(mask, gamma + at));
    if (beta) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, beta + at));
    _mm512_mask_storeu_ps(y + at, mask, value);
  }
}

}  // namespace

void normalize(const float* x, int rows, int columns, const float* gamma, const float* beta, float epsilon, float* y,
               int threads) {
  const long elements = long(rows) * columns;
  const int pieces = static_cast<int>(std::max(1l, std::min(long(rows), elements / kAlone)));
  ThreadPool::shared().run(threads, pieces, [&](int piece) {
    const TileRows some = tile_rows(rows, pieces, piece);
    for (int row = some.first; row < some.first + some.count; ++row) {
      const std::ptrdiff_t at = std::ptrdiff_t(row) * columns;
      normalize_row(x + at, columns, gamma, beta, epsilon, y + at);
    }
  });
}

}  // namespace embert::cpu
