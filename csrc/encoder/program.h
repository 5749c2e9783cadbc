// A model's forward as a list of steps. It is made once, from the description of the model and from what the device's
// products do themselves; encoder/forward.cpp replays it for every batch.
#pragma once

#include <vector>

#include "encoder/encoder_config.h"

namespace embert {

// What the matrix products do beside multiplying (gemm/gemm.h).
struct GemmCaps {
  bool folds = false;  // they apply LayerNorms: rows are stored before their LayerNorm, with sums
  bool rope = false;   // columns of queries and keys
  bool gates = false;
};

enum class Matrix : int { kProjection, kQkv, kAttentionOut, kInner, kOut };

// A LayerNorm of the model: what it follows, or with pre_norm what it precedes.
enum class NormOf : int { kNothing, kEmbedding, kAttention, kOut, kLast };
struct NormName {
  NormOf of = NormOf::kNothing;
  int layer = 0;
  bool exists() const { return of != NormOf::kNothing; }
};

struct ProductPlan {
  Matrix matrix;
  int layer = 0;
  NormName input = {}, residual = {};  // what it applies to its rows, and to the residual's
  NormName next = {};                  // that the readers of its rows apply, with whose gamma these may be multiplied
  bool rope = false, gates = false;
  bool joins = false;  // it is one feed-forward part with the product after it
};

// Memory for rows of activations. Rows that are not normalized yet have sums.
enum class Buffer : int {
  kNothing,
  kX,         // [rows, hidden]: what a layer is given, and leaves
  kSum,       // [rows, hidden]: between the parts of a layer
  kQkv,       // [rows, 3·attention columns]
  kContext,   // [rows, attention columns]
  kInner,     // [rows, inner]
  kGates,     // [rows, 2·inner]: gate, value, gate, value, …
  kEmbedded,  // [rows, embedding]
};
constexpr int kBuffers = 8;

enum class OpKind : int { kEmbed, kProduct, kFeedForward, kRope, kAttend, kGate, kNormalize };

// For profilers; in OpKind's order.
inline const char* name_of(OpKind op) {
  constexpr const char* kNames[] = {"embedding", "GEMM", "feed-forward", "RoPE", "attention", "gate", "LayerNorm"};
  return kNames[int(op)];
}

struct Op {
  OpKind action;
  Buffer x = Buffer::kNothing, y = Buffer::kNothing;
  Buffer residual = Buffer::kNothing;  // kProduct
  bool leaves_stats = false;           // y is not normalized
  int product = 0;                     // kProduct; kAttend: of the context; kFeedForward: the first of two
  int layer = 0;                       // kRope, kAttend
  NormName norm = {};                  // kNormalize
};

struct Program {
  std::vector<ProductPlan> products;  // in the order in which they run
  std::vector<Op> steps;
  NormName last;       // what is still to be applied to the rows that the last step leaves
  int wide = 0;        // columns of the widest rows that lie in one piece of memory: Q, K, V and context; and so on
  int inner_from = 0;  // the column of that piece at which kInner begins, after kGates
};

Program compile(const EncoderConfig& model, const GemmCaps& able);

}  // namespace embert
