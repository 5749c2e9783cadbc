// A model's weights on the device, in one allocation.
#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "attention/work.h"
#include "device/launch.h"
#include "device/memory.h"
#include "embedding/embedding.h"
#include "model/head_weights.h"
#include "model/shape.h"
#include "norm/norm.h"

namespace embert {

// Matrices are of the shape's type, vectors are in FP32.
struct LayerWeights {
  uint8_t *qkv_weight, *attention_weight;  // [3·hidden, hidden]: query, key, value; [hidden, hidden]
  uint8_t *inner_weight, *out_weight;      // [inner, hidden], [hidden, inner]
  float *qkv_bias, *attention_bias;        // [3·hidden], [hidden]
  float *inner_bias, *out_bias;            // [inner], [hidden]
  Norm attention_norm, out_norm;           // [hidden]
};

class Weights {
 public:
  explicit Weights(const ModelShape& shape) : shape_(shape) {}
  Status allocate();

  // Names without a layer (layer −1): word, position, type, gamma, beta. With a layer: query, key, value, attention,
  // inner and out, each .weight and .bias; attention.gamma, attention.beta, out.gamma, out.beta. Where the shape says
  // so, also `padding`: [1, hidden], the padding token's row of positions; and `relative`: [heads, 2·positions − 1] in
  // FP32, the scores by key − query + positions − 1. Those of heads: head_weights.h; a layer's number is the layer
  // here, too. Refused: a name that the model does not have or that was loaded before, or another shape than the
  // model's.
  Status load(const std::string& name, int layer, const void* host, const TensorShape& shape, DType stored,
              const Stream& stream);
  // Refused where one is missing. Else frees the memory for conversions.
  Status complete();

  // To be called before `load`. Matrices that a LayerNorm may be folded into (query, key, value, inner) are then kept
  // in FP32 too, until `forget_exact`. Folded from there, they are rounded once.
  void keep_exact() { keeps_exact_ = true; }
  void forget_exact() { exact_.release(); }
  // [3·hidden, hidden] and [inner, hidden] of a layer, where they are kept.
  const float* exact_qkv(int layer) const { return exact_.as<float>() + layer * exact_count(); }
  const float* exact_inner(int layer) const { return exact_qkv(layer) + 3 * size_t(shape_.hidden) * shape_.hidden; }
  // Whether these matrices and all gammas are here exactly as in the checkpoint.
  bool has_what_is_stored() const { return rounded_ == 0; }

  const EmbeddingTables& tables() const { return tables_; }
  const LayerWeights& layer(int i) const { return layers_[i]; }
  const HeadWeights& heads() const { return heads_; }
  RelativeScores relative() const { return {relative_, shape_.reach()}; }
  size_t bytes() const { return storage_.bytes(); }

 private:
  void carve(uint8_t* base, size_t& bytes);
  Status load_relative(const void* host, const TensorShape& shape, DType stored, const Stream& stream);
  Status find(const std::string& name, int layer, WeightPlace& place) const;
  // Row by row, where the rows are padded.
  Status upload_rows(const void* host, DType stored, const WeightPlace& place, const Stream& stream);
  Status upload(const void* host, size_t count, DType stored, void* to, DType dtype, const Stream& stream);
  // Where a matrix is kept in FP32, if it is. Counts what is rounded.
  Status exact_place(const std::string& name, int layer, DType stored, float*& to);
  size_t exact_count() const { return (3 * size_t(shape_.hidden) + shape_.inner) * shape_.hidden; }  // of a layer

  ModelShape shape_;
  DeviceBuffer storage_, conversion_, exact_;
  EmbeddingTables tables_;
  std::vector<LayerWeights> layers_;
  HeadWeights heads_;
  float* relative_ = nullptr;                     // as in attention/work.h
  std::set<std::pair<int, std::string>> loaded_;  // layer and name
  int rounded_ = 0;
  bool keeps_exact_ = false;
};

}  // namespace embert
