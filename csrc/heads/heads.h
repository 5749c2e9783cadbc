// From the last layer's rows to results: pooling, linear layers, rows of tokens. `T` rows are tokens, end to end; `H`
// is the hidden size. Each launcher checks its arguments, launches on a stream and returns immediately.
#pragma once

#include <cstdint>

#include "common/launch.h"
#include "common/types.h"
#include "heads/tasks.h"
#include "ops/norm.h"

namespace embert {

enum class Pooling : int { kCls = 0, kMean = 1, kMax = 2, kLast = 3 };

// A sequence's cut. The low bits: the dimensions that are kept, 0 for all. This bit: no normalization.
constexpr uint32_t kCutKeepsLength = 1u << 31;

// pool.cu: copies each sequence's row that `pooling` (cls or last token) reads, of `context` and of x with its sums.
// context, context_to: rows of `context_columns`; x_to: [B, H]; sums_to: like x's sums, for B rows.
Status gather(DType dtype, const void* context, int context_columns, const RowView& x, const int* cu_seqlens,
              Pooling pooling, int sequences, int hidden, void* context_to, void* x_to, float2* sums_to,
              const Stream& stream);

// pool.cu: one FP32 vector a sequence, truncated to its dimensions and, where requested, normalized to length 1. rows:
// [T, H], or [B, H] where they are `gathered`; `norm` is applied to rows with row statistics. cuts: by sequence; null:
// whole vectors without normalization. chosen: [sequences], in device memory before the batch's first kernel: the
// sequences that are pooled; null: the first ones. vectors: [sequences, H].
Status pool(DType dtype, Pooling pooling, const RowView& rows, bool gathered, const Norm& norm, float epsilon,
            const int* cu_seqlens, const uint32_t* cuts, const int* chosen, int sequences, int hidden, float* vectors,
            const Stream& stream);

// A linear layer on the device. FP32 for every encoder type: nothing is rounded, and the matrix is read from the L2
// cache.
struct DenseLayer {
  DenseShape shape;
  const float* weight = nullptr;  // [out, dense_pitch(in)]
  const float* bias = nullptr;    // [out]
};

// dense.cu: y[rows, y_pitch] = activation(x[rows, dense_pitch(in)] · Wᵀ + bias). Elements past a row of x or W must be
// 0, and are set to 0 past a row of y.
Status dense(const float* x, int rows, const DenseLayer& layer, float* y, int y_pitch, const Stream& stream);

// pool.cu: y[rows, width]: rows of x truncated to their dimensions and, where requested, normalized to length 1, as
// `pool` does. cuts: by sequence; chosen: [rows], the rows' sequences, or null: row i is sequence i's.
Status cut_rows(const float* x, const uint32_t* cuts, const int* chosen, int rows, int width, float* y,
                const Stream& stream);

// Heads with one row per token. chosen: [rows], the row of x for each row of y; null: the first `rows` ones.
//
// token_heads.cu: y[rows, columns] = rows of x in FP32, unchanged or normalized to length 1.
Status token_rows(DType dtype, const void* x, const int* chosen, int rows, int columns, bool unit_length, float* y,
                  const Stream& stream);

// max_sim.cu: y[documents, parts]: a document's score is the sum of its row. A part is the sum, over 32 vectors of its
// query, of their largest product with one of the document's: -∞ where that has none, 0 without vectors of the query.
// x: [T, columns], rows of any length, which count as of length 1; spans, and after them rows: ScoredDocuments, in
// device memory before the batch's first kernel.
Status max_sims(DType dtype, const void* x, int columns, const int* spans, int documents, int parts, float* y,
                const Stream& stream);

// token_heads.cu: y[rows] = relu(weight · h + bias), h a row of x after `norm`, which is applied to rows with row
// statistics. weight: [hidden]; bias: [1], on the device.
Status token_weights(DType dtype, const RowView& x, const Norm& norm, float epsilon, const int* chosen, int rows,
                     int hidden, const float* weight, const float* bias, float* y, const Stream& stream);

// token_heads.cu: y[texts, columns]: weight · h + bias of each row of x [T, H] whose id is `marker`, in the order of
// the text, then zeros. Markers past the last column are ignored. chosen: [texts], the texts' sequences; null: the
// first ones. weight: [hidden]; bias: [1], on the device.
Status marker_logits(DType dtype, const void* x, const int* ids, const int* cu_seqlens, const int* chosen, int texts,
                     int marker, int hidden, const float* weight, const float* bias, int columns, float* y,
                     const Stream& stream);

// vocabulary.cu: y[rows] = log Σ exp(x · matrixᵀ), the logits of a language model, summed up. x: [rows, hidden],
// rounded to the matrix's type; matrix: [vocabulary, hidden]. `scratch` has room for the rounded rows and for at least
// one row's parts, 8 bytes for 128 rows of the matrix; with more room, more rows share one read of the matrix.
Status vocabulary_mass(DType dtype, const float* x, int rows, const void* matrix, int vocabulary, int hidden,
                       float* scratch, size_t scratch_floats, float* y, const Stream& stream);

}  // namespace embert
