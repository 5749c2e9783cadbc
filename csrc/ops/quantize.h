// Rows in int8, for GEMMs whose operands are rotated integers (EPILOGUES.md).
//
// A set of 32 columns is rotated together: eight adjacent columns of each quarter of the row, so that one thread has
// them all. Set m's element n = 8j + e is column 8m + j · columns / 4 + e. The 32 elements are multiplied by the
// Sylvester-Hadamard matrix of order 32 in place, then all of a row are rounded to -127 … 127 by a scale of the row.
// engine/quantization/blocks.py is the same in numpy, to the bit.
#pragma once

#include <cstdint>

#include "common/launch.h"
#include "common/types.h"
#include "ops/norm.h"

namespace embert {

constexpr int kRotated = 32;         // columns of a set
constexpr int kQuantizedStep = 128;  // columns of a row are a multiple of them
constexpr int kMaxQuantized = 8192;  // columns of a row; kMaxStatColumns with a LayerNorm

// Memory for quantized rows.
struct QuantizedRows {
  int8_t* data = nullptr;   // [rows, columns]
  float* scales = nullptr;  // [rows]
};

// Memory for rows quantized in blocks, by the blocks' own maxima (blocks.cuh).
struct QuantizedBlocks {
  int8_t* data = nullptr;  // [rows, columns]
  void* maxima = nullptr;  // FP16 [rows, columns / block]

  // In memory that otherwise holds such rows in FP16.
  static QuantizedBlocks in(void* memory, int rows, int columns) {
    auto* const data = static_cast<int8_t*>(memory);
    return {data, data + size_t(rows) * columns};
  }
};

// Columns of a block: of inner activations, and of attention's context for heads of this size. A rotation inside a
// smaller head is too short: with heads of 32 all-MiniLM-L6-v2 keeps fewer nearest neighbors, and is not faster.
constexpr int kInnerBlock = 128, kHeadBlock = 64;

// True if rows with this number of columns can be quantized, with or without a LayerNorm before.
constexpr bool quantize_supports(int columns, bool normed) {
  return columns > 0 && columns % kQuantizedStep == 0 && columns <= (normed ? kMaxStatColumns : kMaxQuantized);
}

// The rotation is in FP16: times 2⁻⁵, then butterflies of strides 2, 4, 8, 16 and 1. With m the largest magnitude of a
// row's rotated elements y, k = clip(-⌊log₂ m⌋, -15, 15) and t = half(127 / (m · 2ᵏ)): q = rint(y · 2ᵏ · t), half to
// even, and a scale of √32 · 2⁻ᵏ / t. A row of zeros has scale 0; a row that is not finite has a scale that is not. x
// with sums: its LayerNorm is applied first, in FP32, and rounded to FP16.
Status quantize_rows(DType dtype, const RowView& x, const Norm& norm, int rows, int columns, float epsilon,
                     const QuantizedRows& to, const Stream& stream);

// The same for rows in blocks of 128 or 64 columns: each block is rotated and rounded by itself first, as in the
// kernels that write rows in blocks. x, in FP16, is a quarter of inner activations (ops/activation.cuh), or
// attention's context.
Status quantize_block_rows(DType dtype, const void* x, int rows, int columns, int block, const QuantizedRows& to,
                           const Stream& stream);

}  // namespace embert
