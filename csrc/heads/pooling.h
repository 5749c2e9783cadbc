// From the last layer's rows to vectors. `T` rows are tokens, end to end; `H` is the hidden size. Each launcher checks
// its arguments, launches on a stream and returns immediately.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/launch.h"
#include "ops/norm.h"

namespace embert {

enum class Pooling : int { kCls = 0, kMean = 1, kMax = 2, kLast = 3 };

// A sequence's cut. The low bits: the dimensions that are kept, 0 for all. This bit: no normalization.
constexpr uint32_t kCutKeepsLength = 1u << 31;

// gather.cu: copies each sequence's row that `pooling` (cls or last token) reads, of `context` and of x with its sums.
// context_to, x_to: [B, H]; sums_to: like x's sums, for B rows.
Status gather(DType dtype, const void* context, const RowView& x, const int* cu_seqlens, Pooling pooling, int sequences,
              int hidden, void* context_to, void* x_to, float2* sums_to, const Stream& stream);

// pool.cu: one FP32 vector a sequence, truncated to its dimensions and, where requested, normalized to length 1. rows:
// [T, H], or [B, H] where they are `gathered`; `norm` is applied to rows with row statistics. cuts: by sequence; null:
// whole vectors without normalization. chosen: [sequences], in device memory before the batch's first kernel: the
// sequences that are pooled; null: the first ones. vectors: [sequences, H]. longest: at least the rows of the longest
// sequence; it decides how many blocks share a sequence, which changes no bits.
Status pool(DType dtype, Pooling pooling, const RowView& rows, bool gathered, const Norm& norm, float epsilon,
            const int* cu_seqlens, const uint32_t* cuts, const int* chosen, int sequences, int longest, int hidden,
            float* vectors, const Stream& stream);

}  // namespace embert
