// A model's shape and its weights on the device, in one allocation.
#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../kernels/kernels.h"
#include "memory.h"

namespace embert {

struct ModelShape {
  int hidden = 0, layers = 0, heads = 0, inner = 0;
  int vocabulary = 0, positions = 0, types = 0;  // rows of the embedding tables; types 0: the model has none
  bool relative = false;                         // scores by how far a key is from the query
  bool padding = false;  // the position table has a row more than `positions`, the last: the padding token's
  float epsilon = 1e-12f;
  Activation activation = Activation::kGeluErf;
  Pooling pooling = Pooling::kMean;
  DType dtype = DType::kFloat16;  // of weights and activations

  int head_size() const { return hidden / heads; }
  int max_length() const { return positions; }
  int position_rows() const { return positions + (padding ? 1 : 0); }
  // Distances that `relative` scores are held for, on each side: whole tiles of attention.
  int reach() const { return relative ? (positions + kAttentionRows - 1) / kAttentionRows * kAttentionRows : 0; }
  Status check() const;
};

// Matrices are of the shape's type, vectors of FP32.
struct LayerWeights {
  uint8_t *qkv_weight, *attention_weight;  // [3·hidden, hidden]: query, key, value; [hidden, hidden]
  uint8_t *inner_weight, *out_weight;      // [inner, hidden], [hidden, inner]
  float *qkv_bias, *attention_bias;        // [3·hidden], [hidden]
  float *inner_bias, *out_bias;            // [inner], [hidden]
  Norm attention_norm, out_norm;           // [hidden]
};

using TensorShape = std::vector<size_t>;  // [rows, columns] or [elements]

class Weights {
 public:
  explicit Weights(const ModelShape& shape) : shape_(shape) {}
  Status allocate();

  // Names without a layer (layer −1): word, position, type, gamma, beta. With a layer: query, key, value, attention,
  // inner and out, each .weight and .bias; attention.gamma, attention.beta, out.gamma, out.beta. And where the shape
  // says so `padding`: [1, hidden], the padding token's row of positions; `relative`, in FP32: [heads, 2·positions -
  // 1], what is added to a score by key - query + positions - 1. Refused: a name that the model does not have or that
  // was loaded before, another shape than the model's.
  Status load(const std::string& name, int layer, const void* host, const TensorShape& shape, DType stored,
              const Stream& stream);
  // Refused where one is missing. Else the room for conversions is given back.
  Status complete();

  // To be called before `load`: matrices that a LayerNorm may be folded into (query, key, value, inner) are kept in
  // FP32, too, until `forget_exact`: folded from there, they are rounded once.
  void keep_exact() { keeps_exact_ = true; }
  void forget_exact() { exact_.release(); }
  // [3·hidden, hidden] and [inner, hidden] of a layer, where they are kept.
  const float* exact_qkv(int layer) const { return exact_.as<float>() + layer * exact_count(); }
  const float* exact_inner(int layer) const { return exact_qkv(layer) + 3 * size_t(shape_.hidden) * shape_.hidden; }
  // Whether these matrices and all gammas are in the checkpoint what they are here, not rounded.
  bool has_what_is_stored() const { return rounded_ == 0; }

  const EmbeddingTables& tables() const { return tables_; }
  const LayerWeights& layer(int i) const { return layers_[i]; }
  RelativeScores relative() const { return {relative_, shape_.reach()}; }
  size_t bytes() const { return storage_.bytes(); }

 private:
  void carve(uint8_t* base, size_t& bytes);
  Status load_relative(const void* host, const TensorShape& shape, DType stored, const Stream& stream);
  // Where a tensor goes, and what it has to be.
  struct Place {
    void* to = nullptr;
    TensorShape shape;
    DType dtype = DType::kFloat32;
  };
  Status find(const std::string& name, int layer, Place& place) const;
  Status upload(const void* host, size_t count, DType stored, void* to, DType dtype, const Stream& stream);
  // Where a matrix is to be kept in FP32, if it is. Counts what is rounded.
  Status exact_place(const std::string& name, int layer, DType stored, float*& to);
  size_t exact_count() const { return (3 * size_t(shape_.hidden) + shape_.inner) * shape_.hidden; }  // of a layer

  ModelShape shape_;
  DeviceBuffer storage_, conversion_, exact_;
  EmbeddingTables tables_;
  std::vector<LayerWeights> layers_;
  float* relative_ = nullptr;                     // as kernels/shapes.h has it
  std::set<std::pair<int, std::string>> loaded_;  // layer and name
  int rounded_ = 0;
  bool keeps_exact_ = false;
};

}  // namespace embert
