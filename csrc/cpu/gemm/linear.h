// Linear layers on a CPU with AVX-512, in float32 and (with VNNI) in int8.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace embert::cpu {

enum class Activation { kNone, kGelu, kGeluTanh, kRelu, kSilu };

// The epilogue of a product, element by element. `residual` and `gate` are [rows, out]; at most one is given, and then
// there is no activation.
struct Epilogue {
  Activation activation = Activation::kNone;
  const float* residual = nullptr;
  const float* gate = nullptr;
};

// A linear layer of any kind of product.
class LinearLayer {
 public:
  virtual ~LinearLayer();

  // x [rows, in] → y [rows, out] = epilogue of x · weightᵀ + bias. A row of y is batch-invariant.
  virtual void operator()(const float* x, int rows, const Epilogue& epilogue, float* y, int threads) const = 0;

  int out() const { return out_; }
  int in() const { return in_; }

 protected:
  LinearLayer(int out, int in) : out_(out), in_(in) {}

  // Frees the panels of a weight.
  struct Free {
    void operator()(void* memory) const;
  };

  int out_, in_;
};

// x · weightᵀ + bias in float32.
class Linear final : public LinearLayer {
 public:
  // `weight` is [out, in] and `bias` [out]; both are copied.
  Linear(const float* weight, const float* bias, int out, int in);
  ~Linear() override;

  void operator()(const float* x, int rows, const Epilogue& epilogue, float* y, int threads) const override;

 private:
  std::unique_ptr<float[], Free> panels_;  // [⌈out / 64⌉, in, 64], then the bias [⌈out / 64⌉ · 64]
  const float* bias_;
};

// x · weightᵀ + bias; x is rotated and quantized row by row, sums are exact.
class Int8LinearAvx512 final : public LinearLayer {
 public:
  // `weight` is [out, in], rotated, with `in` a multiple of 128; `scales` and `bias` are [out]. All are copied.
  Int8LinearAvx512(const std::int8_t* weight, const float* scales, const float* bias, int out, int in);
  ~Int8LinearAvx512() override;

  void operator()(const float* x, int rows, const Epilogue& epilogue, float* y, int threads) const override;

 private:
  std::unique_ptr<std::int8_t[], Free> panels_;  // [⌈out / 64⌉, in / 4, 64, 4]
  std::vector<std::int32_t> zeros_;              // [⌈out / 64⌉ · 64]: -128 times the sum of a channel's integers
  std::vector<float> scales_, bias_;             // likewise
};

}  // namespace embert::cpu
