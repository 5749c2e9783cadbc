// A model's forward pass as a list of ops. It is compiled once, from the model's configuration and from what the
// device's GEMMs fuse; encoder/forward.cpp replays it for every batch.
#pragma once

#include <vector>

#include "encoder/encoder_config.h"

namespace embert {

// Ops that the GEMMs fuse (gemm/gemm.h).
struct GemmCaps {
  bool folds = false;  // they apply LayerNorms: rows are stored before their LayerNorm, with row statistics
  bool rope = false;   // columns of queries and keys
  bool gates = false;
  bool experts = false;  // they multiply grouped rows
};

// The last three are of a layer's own input: made of the embeddings, gated, and added.
enum class Matrix : int { kProjection, kQkv, kAttentionOut, kInner, kOut, kInput, kInputGate, kInputDense };
constexpr int kMatrices = 8;

// A norm of the model: the op that it follows, or with pre_norm precedes. kAttentionSublayer and kOutSublayer follow
// attention and the feed-forward layer where others precede them; kInputs and kInputSublayer follow a layer's own input
// and what the layer adds of it.
enum class NormKind : int {
  kNothing,
  kEmbedding,
  kAttention,
  kOut,
  kLast,
  kAttentionSublayer,
  kOutSublayer,
  kInputs,
  kInputSublayer
};
constexpr int kNormKinds = 9;
struct NormRef {
  NormKind kind = NormKind::kNothing;
  int layer = 0;
  bool exists() const { return kind != NormKind::kNothing; }
};

struct GemmPlan {
  Matrix matrix;
  int layer = 0;
  NormRef input = {}, residual = {};  // of its rows, and of the residual's
  NormRef next = {};                  // applied by the readers of its rows; these may be prescaled with its gamma
  NormRef before = {};                // pre-norm: with its gamma the rows of the residual may be prescaled
  bool rope = false, gates = false;
  bool fuses_next = false;  // it is fused with the GEMM after it into one feed-forward layer
};

// Memory for rows of activations. Rows that are not normalized yet have row statistics.
enum class Buffer : int {
  kNothing,
  kX,         // [rows, hidden]: a layer's input and output
  kSum,       // [rows, hidden]: between attention and the feed-forward layer
  kQkv,       // [rows, qkv_columns]: queries, keys, values; or the input of a convolution
  kContext,   // [rows, context_columns]
  kInner,     // [rows, inner]
  kGates,     // [rows, 2·inner]: gate, value, gate, value, …
  kEmbedded,  // [rows, embedding]; with inputs of layers the embeddings, which stay
  kInput,     // [rows, layer_inputs]
  kGated,     // [rows, layer_inputs]: the input, times a gate
  kExperts,   // the outputs of experts (gemm/gemm.h)
};
constexpr int kBuffers = 11;

enum class OpKind : int {
  kEmbed,
  kGemm,
  kFeedForward,
  kRope,
  kAttend,
  kConvolve,
  kGate,
  kNormalize,
  kAddNormalized,
  kTimesNormalized,
  kExperts
};

// For profilers; in OpKind's order.
inline const char* name_of(OpKind op) {
  constexpr const char* kNames[] = {"embedding",         "GEMM",          "feed-forward", "RoPE",
                                    "attention",         "convolution",   "gate",         "norm",
                                    "norm and residual", "norm and gate", "experts"};
  return kNames[int(op)];
}

struct Op {
  OpKind action;
  Buffer x = Buffer::kNothing, y = Buffer::kNothing;
  Buffer residual = Buffer::kNothing;  // kGemm
  bool writes_stats = false;           // y is not normalized yet
  int gemm = 0;                        // kGemm; kAttend: of the context; kFeedForward: the first of two
  // kRope (with norms of queries and keys where the model has them), kAttend, kConvolve, kExperts
  int layer = 0;
  // Of x, which kAddNormalized adds to y, and kTimesNormalized multiplies by y; kExperts: of the sum.
  NormRef norm = {};
  NormRef before = {}, next = {};  // kAddNormalized, kEmbed: of y, as of a GEMM's residual and rows
};

struct Program {
  std::vector<GemmPlan> gemms;  // in the order in which they run
  std::vector<Op> steps;
  NormRef last;          // still to be applied to the rows of the last op
  int widest = 0;        // columns of the widest rows in one piece of memory, such as Q, K, V and context
  int context_from = 0;  // the column of that piece at which kContext begins, after the widest kQkv
  int inner_from = 0;    // likewise kInner, after kGates
  bool groups_experts = false;
};

Program compile(const EncoderConfig& model, const GemmCaps& caps);

}  // namespace embert
