// int8 linear layers on a CPU with AVX-512 VNNI.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/products/linear.h"

namespace embert::cpu {

// x · weightᵀ + bias; x is rotated and quantized row by row, sums are exact.
class Int8LinearAvx512 final : public LinearLayer {
 public:
  // `weight` is [out, in], rotated, with `in` a multiple of 128; `scales` and `bias` are [out]. All are copied.
  Int8LinearAvx512(const std::int8_t* weight, const float* scales, const float* bias, int out, int in);
  ~Int8LinearAvx512() override;

  void operator()(const float* x, int rows, const Epilogue& epilogue, float* y, int threads) const override;

  int out() const override { return out_; }
  int in() const override { return in_; }

 private:
  struct Free {
    void operator()(std::int8_t* memory) const;
  };

  int out_, in_;
  std::unique_ptr<std::int8_t[], Free> panels_;  // [⌈out / 64⌉, in / 4, 64, 4]
  std::vector<std::int32_t> zeros_;              // [⌈out / 64⌉ · 64]: -128 times the sum of a channel's integers
  std::vector<float> scales_, bias_;             // likewise
};

}  // namespace embert::cpu
