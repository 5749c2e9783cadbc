#include <algorithm>
#include <cstddef>
#include <cstring>

#include "cpu/functions.h"
#include "cpu/gemm/epilogue.h"
#include "cpu/gemm/tile.h"
#include "cpu/kernels.h"
#include "cpu/memory.h"

namespace embert::cpu::EMBERT_ISA {
namespace {

class Linear final : public LinearLayer {
 public:
  Linear(const float* weight, const float* bias, int out, int in)
      : LinearLayer(out, in), panels_(std::size_t(panels_of(out)) * kTileColumns * (std::size_t(in) + 1)) {
    for (int column = 0; column < out; ++column) {
      float* const to = panels_.data() + std::size_t(column / kTileColumns) * in * kTileColumns + column % kTileColumns;
      for (int k = 0; k < in; ++k) to[std::size_t(k) * kTileColumns] = weight[std::size_t(column) * in + k];
    }
    bias_ = panels_.data() + std::size_t(panels_of(out)) * kTileColumns * in;
    std::copy(bias, bias + out, bias_);
  }

  void operator()(const float* x, int rows, const Epilogue& epilogue, float* y, int threads) const override {
    for_tiles<kTileRows, kStrips>(rows, out_, in_, threads, [&](int column, int first, auto count, auto vectors) {
      constexpr int kRows = count, kVectors = vectors;
      const float* const weight = panels_.data() + panel_offset(column, in_) + column % kTileColumns;
      Floats sums[kRows][kVectors];
      multiply<kRows, kVectors>(x + std::ptrdiff_t(first) * in_, in_, weight, kTileColumns, in_, sums, kPartialDepth,
                                floats_ahead<kVectors>(in_));
      for (int row = 0; row < kRows; ++row) {
        for (int v = 0; v < kVectors; ++v) sums[row][v] += load(bias_ + column + v * kLanes);
      }
      store_epilogue(sums, epilogue, y, std::ptrdiff_t(first) * out_ + column, out_,
                     std::min(kVectors * kLanes, out_ - column));
    });
  }

 private:
  Array<float> panels_;  // [⌈out / kTileColumns⌉, in, kTileColumns], then the bias
  float* bias_;
};

}  // namespace

std::unique_ptr<LinearLayer> linear(const float* weight, const float* bias, int out, int in) {
  return std::make_unique<Linear>(weight, bias, out, in);
}

}  // namespace embert::cpu::EMBERT_ISA
