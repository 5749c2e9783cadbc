// A model's shape: everything about it that is not a weight.
#pragma once

#include "attention/work.h"
#include "device/dtype.h"
#include "device/status.h"
#include "elementwise/activation.h"
#include "heads/pooling.h"
#include "heads/task_heads.h"

namespace embert {

struct ModelShape {
  int hidden = 0, layers = 0, heads = 0, inner = 0;
  int vocabulary = 0, positions = 0, types = 0;  // rows of the embedding tables; types 0: the model has none
  bool relative = false;                         // attention adds scores by key − query
  bool padding = false;  // the position table has one more row, the last: the padding token's
  float epsilon = 1e-12f;
  Activation activation = Activation::kGeluErf;
  Pooling pooling = Pooling::kMean;
  TaskHeads task_heads;
  DType dtype = DType::kFloat16;  // of weights and activations

  int head_size() const { return hidden / heads; }
  int max_length() const { return positions; }
  int position_rows() const { return positions + (padding ? 1 : 0); }
  int width() const { return task_heads.width(hidden); }  // of EMBED's vectors
  // On each side, the distances for which `relative` scores are kept: whole tiles of attention.
  int reach() const { return relative ? (positions + kAttentionRows - 1) / kAttentionRows * kAttentionRows : 0; }
  // Refused where the CUDA encoder cannot run a model of this shape.
  Status check() const;

 private:
  Status check_heads() const;
};

}  // namespace embert
