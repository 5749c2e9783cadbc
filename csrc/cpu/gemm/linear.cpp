#include "cpu/gemm/linear.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "cpu/gemm/epilogue.h"
#include "cpu/gemm/tile.h"

namespace embert::cpu {

LinearLayer::~LinearLayer() = default;

Linear::~Linear() = default;

void LinearLayer::Free::operator()(void* memory) const {
  std::free(memory);
}

Linear::Linear(const float* weight, const float* bias, int out, int in) : LinearLayer(out, in) {
  const std::size_t columns = std::size_t(panels_of(out)) * kTileColumns;
  const std::size_t bytes = columns * (std::size_t(in) + 1) * sizeof(float);
  auto* const memory = static_cast<float*>(std::aligned_alloc(64, bytes));
  if (!memory) throw std::bad_alloc();
  panels_.reset(memory);
  std::memset(memory, 0, bytes);
  for (int column = 0; column < out; ++column) {
    float* const to = memory + std::size_t(column / kTileColumns) * in * kTileColumns + column % kTileColumns;
    for (int k = 0; k < in; ++k) to[std::size_t(k) * kTileColumns] = weight[std::size_t(column) * in + k];
  }
  float* const to = memory + columns * in;
  std::copy(bias, bias + out, to);
  bias_ = to;
}

void Linear::operator()(const float* x, int rows, const Epilogue& epilogue, float* y, int threads) const {
  for_tiles(rows, out_, in_, threads, [&](int panel, int first, auto count) {
    constexpr int kRows = count;
    const float* const weight = panels_.get() + std::size_t(panel) * in_ * kTileColumns;
    const int column = panel * kTileColumns, columns = std::min(kTileColumns, out_ - column);
    Floats sums[kRows][kTileVectors];
    multiply<kRows, kTileVectors>(x + std::ptrdiff_t(first) * in_, in_, weight, kTileColumns, in_, sums);
    for (int row = 0; row < kRows; ++row) {
      for (int v = 0; v < kTileVectors; ++v) {
        sums[row][v] = _mm512_add_ps(sums[row][v], _mm512_loadu_ps(bias_ + column + v * kLanes));
      }
      store_epilogue(sums[row], epilogue, y, std::ptrdiff_t(first + row) * out_ + column, columns);
    }
  });
}

}  // namespace embert::cpu
