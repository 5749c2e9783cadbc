// The configuration of a SPLADE head, besides its weights.
#pragma once

#include "common/dtype.h"
#include "ops/activation.h"

namespace embert {

// A model's SPLADE configuration.
struct SpladeKind {
  Activation activation = Activation::kGeluErf;  // of the transform
  float epsilon = 1e-12f;                        // of its LayerNorm
  int logs = 1;      // 2: log1p(log1p(relu(x))), which sentence-transformers calls log1p_relu
  bool tied = true;  // the decoder is the word table
};

struct SpladeShape : SpladeKind {
  int hidden = 0, vocabulary = 0;
  DType dtype = DType::kFloat16;
};

}  // namespace embert
