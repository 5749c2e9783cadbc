// Products of 8 bits on any device (EPILOGUES.md): rows are quantized as on Hopper, a library multiplies integers, and
// a kernel makes rows of the sums.
#pragma once

#include <cstdint>
#include <memory>

#include "gemm/gemm.h"

namespace embert {

// sums[rows, out] = x[rows, in] · W[out, in]ᵀ of int8, exactly. Rows are counted in whole groups of kIntegerRows.
class IntegerProduct {
 public:
  virtual ~IntegerProduct() = default;
  virtual Status run(const int8_t* x, int rows, int32_t* sums, const Stream& stream) = 0;
};

// Integer kernels of libraries want whole groups of rows; some refuse 16. What is multiplied past the last row is read
// by nobody, so memory for quantized rows has whole groups.
constexpr int kIntegerRows = 32;

// Memory for sums, which all products of a provider share: what the L2 cache of an A100 (40 MB) and of newer GPUs of
// that class holds, so that by count the sums of a piece of rows need not come from memory when they are read.
constexpr size_t kSumBytes = size_t(32) << 20;

// Rows whose sums fit: whole groups.
constexpr int rows_at_once(int out) {
  return int(kSumBytes / (size_t(out) * sizeof(int32_t))) / kIntegerRows * kIntegerRows;
}

// What a product of these weights cannot be; else ok.
Status check_portable_int8(DType dtype, const LinearWeights& weights);

// sums: kSumBytes, which products one after another share.
std::unique_ptr<Linear> make_portable_int8(const LinearWeights& weights, std::unique_ptr<IntegerProduct> product,
                                           int32_t* sums);

}  // namespace embert
