// A model's weights on the device, in one allocation: of its layers, and of its task heads.
#pragma once

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "common/launch.h"
#include "common/memory.h"
#include "common/types.h"
#include "encoder/encoder_config.h"
#include "encoder/program.h"
#include "heads/heads.h"
#include "heads/splade.h"
#include "heads/tasks.h"
#include "ops/attention_work.h"
#include "ops/convolution.h"
#include "ops/elementwise.h"
#include "ops/embedding.h"
#include "ops/norm.h"

namespace embert {

using TensorShape = std::vector<size_t>;  // [rows, columns] or [elements]

inline size_t elements_of(const TensorShape& shape) {
  size_t count = 1;
  for (const size_t size : shape) count *= size;
  return count;
}

// The order of a matrix's rows, where GEMMs need another one than the checkpoint's (gemm/gemm.h).

// The row of the checkpoint's query or key that becomes row i of ours: of each head, elements j and j + rotary_dim/2,
// which RoPE rotates together, become adjacent. Scores are sums over a head's columns, so they do not change. Gammas of
// a head's norm have the same order.
constexpr int rope_row(int i, int head_size, int rotary_dim) {
  const int column = i % head_size;
  if (column >= rotary_dim) return i;
  return i - column + column / 2 + column % 2 * (rotary_dim / 2);
}

// The destination of row j of a gate (part 0) or of its value (part 1).
constexpr int gated_row(int j, int part) {
  return 2 * j + part;
}

// A tensor's destination, with its shape and type there.
struct WeightView {
  void* to = nullptr;
  TensorShape shape;
  DType dtype = DType::kFloat32;
  size_t pitch = 0;          // elements from row to row; 0: as many as a row has
  bool interleaved = false;  // gaps between rows belong to another tensor; otherwise they are zeros
};

// A layer of the multi-vector head, for the encoder's GEMMs.
struct HeadGemmWeights {
  DenseShape shape;
  uint8_t* weight;  // [out, in] of the encoder's type
  float* bias;      // [out]
};

// Weights of the task heads.
struct HeadWeights {
  std::vector<DenseLayer> dense, classifier;
  std::vector<HeadGemmWeights> multi;
  Norm multi_norm;                      // [hidden]: between the layers of multi
  const float* token_weight = nullptr;  // [hidden]
  const float* token_bias = nullptr;    // [1]
  SpladeWeights splade;
  const void* vocabulary = nullptr;  // [vocabulary, hidden] of the encoder's type: of LABEL_MASS
};

// The weights of one GEMM. The matrix is of the model's type or int8, vectors are in FP32. With RoPE, the rows of query
// and key are in the order above. With gates kInner has twice as many rows: gate, value, gate, value, …
struct MatrixWeights {
  uint8_t* weight = nullptr;  // [out, in]
  float* bias = nullptr;      // [out]
  int out = 0, in = 0;
  float* scales = nullptr;       // [out]: `weight` is int8
  const float* exact = nullptr;  // [out, in] in FP32, where it is kept
};

struct LayerWeights {
  std::array<MatrixWeights, kMatrices> matrices;                  // those that a layer has, by Matrix
  std::array<Norm, kNormKinds> norms;                             // likewise, by NormKind; an RMSNorm may have no beta
  float *query_norm = nullptr, *key_norm = nullptr;               // [head size]: gammas; null: none
  float* input_divisors = nullptr;                                // [hidden]: Weights::load
  uint8_t *distance_keys = nullptr, *distance_queries = nullptr;  // [distance rows, attention]; null: none
  Taps taps;                                                      // [taps, hidden], [hidden]: of a convolution
  // In the place of inner and out: [experts, hidden], [experts · inner, hidden], [experts · hidden, inner], [hidden].
  float* router = nullptr;
  uint8_t *experts_inner = nullptr, *experts_out = nullptr;
  float* experts_bias = nullptr;
  // With int8 the LayerNorms of QKV's and FFN in's rows, with each column divided by its factor, by which the matrices
  // are multiplied (engine/quantization/blocks.py).
  Norm qkv_norm, inner_norm;  // [hidden]
};

// For messages.
inline std::string called(const std::string& name, int layer) {
  return layer < 0 ? name : name + " of layer " + std::to_string(layer);
}

class Weights {
 public:
  explicit Weights(const EncoderConfig& model) : model_(model) {}
  Status allocate();

  // Names without a layer (layer −1): word, position, type, gamma, beta. With a layer: query, key, value, attention,
  // inner and out, each .weight and .bias; attention.gamma, attention.beta, out.gamma, out.beta. All are in the model's
  // own order. Where the model has it, also
  //   padding [1, hidden]: the padding token's row of positions;
  //   relative [heads, 2·positions − 1] in FP32: the scores by key − query + positions − 1;
  //   projection.weight [hidden, embedding], projection.bias, last.gamma, last.beta;
  //   gate.weight, gate.bias of a layer, shaped as inner's;
  //   query_norm.gamma, key_norm.gamma [head size]; attention_sublayer.gamma, out_sublayer.gamma [hidden]; RMSNorms'
  //   gammas include what the model adds to them;
  //   inputs.gamma [inputs] of the norm of layers' own inputs; of a layer's input.weight and input_gate.weight
  //   [inputs, hidden], input_dense.weight [hidden, inputs], each with its .bias; input_sublayer.gamma [hidden], times
  //   the factor of the layer's rows, and input_divisors [hidden], one over that factor;
  //   distances [2·positions − 1] in FP32: the row for query − key + positions − 1; distance_keys and distance_queries
  //   [distance rows, heads · head size] of a layer (DisentangledScores);
  //   router.weight [experts, hidden], experts_inner.weight [experts · inner, hidden], experts_out.weight [experts ·
  //   hidden, inner] and experts.bias [hidden] in the place of inner and out of a layer;
  //   convolution.weight [3 · hidden, hidden], convolution.bias in the place of query, key and value of a layer, and
  //   its taps.weight [taps, hidden], from the earliest row's on, taps.bias [hidden];
  //   angles [positions, rotary_dim / 2, 2] in FP32: cos and sin; a table's number is the layer here.
  //   query.scale, key.scale, value.scale, attention.scale, inner.scale, out.scale: of int8 matrices;
  //   query.gamma, query.beta, inner.gamma, inner.beta: with int8 the LayerNorms of what QKV and FFN in multiply.
  // Layers that share weights have them under one number. Of heads, by the number of a linear layer: dense, classifier
  // and multi, each .weight [out, in] and .bias [out]. Without a number: token_weights.weight [1, hidden],
  // token_weights.bias [1]; multi.gamma and multi.beta [hidden] of the LayerNorm between multi's layers; with SPLADE
  // splade.transform.weight, .bias, .gamma, .beta, splade.decoder.bias, and splade.decoder.weight where it is not tied;
  // with LABEL_MASS vocabulary.weight [vocabulary, hidden] where it is not tied. Biases and betas that a checkpoint
  // does not have are loaded as zeros. Refused: a name that the model does not have or that was loaded before, or
  // another shape than the model's.
  Status load(const std::string& name, int layer, const void* host, const TensorShape& shape, DType stored,
              const Stream& stream);
  // Returns an error if a tensor is missing. Otherwise frees the memory for conversions.
  Status complete();

  // To be called before `load`. Matrices that a LayerNorm may be folded into (query, key, value, inner, gate) are then
  // kept in FP32 too, until `forget_exact`. Folding starts from FP32, so they are rounded once.
  void keep_exact() { keeps_exact_ = true; }
  void forget_exact() { exact_.release(); }
  // Divides the gammas of pre-norm layers between rows and matrices (ops/norm.h).
  Status split_gammas(const Stream& stream);
  // True if rows are stored multiplied by the gamma of their next norm (LinearWeights::prescaled_rows): where these
  // matrices and all gammas are stored exactly as in the checkpoint. Rows of pre-norm models are the residual, too.
  // They are divided by the gamma again, which needs no μ: RMSNorms only.
  bool prescales_rows() const { return keeps_exact_ && rounded_ == 0 && (!model_.pre_norm || model_.rms_norm); }
  // The factors of rows before a norm; null: none.
  const float* factors(const NormRef& next) const { return prescales_rows() ? norm(next).gamma : nullptr; }
  // What kAddNormalized divides its rows by, before it adds to them; null: nothing.
  const float* divisors(const Op& op) const {
    return op.norm.kind == NormKind::kInputSublayer ? layer(op.norm.layer).input_divisors : factors(op.before);
  }

  const EmbeddingTables& tables() const { return tables_; }
  // Gammas of the norms of a layer's queries and keys; null: none.
  HeadNorms head_norms(int layer_index) const {
    return {layer(layer_index).query_norm, layer(layer_index).key_norm, model_.heads, model_.epsilon};
  }
  const LayerWeights& layer(int i) const { return layers_[model_.stored(i)]; }
  MatrixWeights matrix(Matrix kind, int layer) const;
  Norm norm(const NormRef& name) const;
  // The LayerNorm that a GEMM applies to its rows; none if it applies none.
  Norm input_norm(const GemmPlan& plan) const;
  const float2* angles(int table) const { return angles_[table]; }
  const HeadWeights& heads() const { return heads_; }
  RelativeScores relative() const { return {relative_, model_.reach()}; }
  DisentangledScores distances(int layer_index) const {
    const LayerWeights& w = layer(layer_index);
    return {w.distance_keys, w.distance_queries, distances_, model_.positions};
  }
  // All tensors to load, by layer and name.
  const std::map<std::pair<int, std::string>, WeightView>& tensors() const { return tensors_; }
  size_t bytes() const { return storage_.bytes(); }

 private:
  // Divides memory among all tensors, and names them. Without a base it only computes the size.
  void lay_out(uint8_t* base, size_t& bytes);
  class Layout;
  void lay_out_layer(Layout& layout, int i);
  void lay_out_heads(Layout& layout);
  Status load_relative(const float* host, const Stream& stream);
  Status load_distances(const float* host, const Stream& stream);
  Status load_into(const WeightView& view, const std::string& name, int layer, const void* host, DType stored,
                   const Stream& stream);
  // `host` in the order in which GEMMs need the rows of a layer's query or key; otherwise `host` itself.
  const void* ordered(const std::string& name, int layer, const void* host, size_t row_bytes,
                      std::vector<uint8_t>& memory) const;
  // Interleaved rows, through interleave_scratch_: conversions need contiguous elements. Some rows at a time.
  Status upload_interleaved(const void* host, DType stored, const WeightView& view, float* exact, const Stream& stream);
  // Row by row, for padded rows.
  Status upload_rows(const void* host, DType stored, const WeightView& view, const Stream& stream);
  Status upload(const void* host, size_t count, DType stored, void* to, DType dtype, const Stream& stream) const {
    return embert::upload(host, count, stored, to, dtype, conversion_.as(), stream);
  }
  // The FP32 copy of a matrix, if it is kept. Counts the matrices that are rounded.
  Status exact_copy(const std::string& name, int layer, DType stored, float*& to);
  int inner_rows() const { return (model_.gated ? 2 : 1) * model_.inner; }
  size_t exact_count() const { return size_t(widest_qkv_ + inner_rows()) * model_.hidden; }  // of a layer

  EncoderConfig model_;
  DeviceBuffer storage_, conversion_, interleave_scratch_, exact_;
  EmbeddingTables tables_;
  std::vector<LayerWeights> layers_;
  HeadWeights heads_;
  MatrixWeights projection_;            // [hidden, embedding]
  std::array<Norm, kNormKinds> norms_;  // of the model, by NormKind
  std::vector<float2*> angles_;         // of each table: [positions, rotary_dim / 2]
  float* relative_ = nullptr;           // as in ops/attention_work.h
  int16_t* distances_ = nullptr;        // as in DisentangledScores
  std::map<std::pair<int, std::string>, WeightView> tensors_;
  std::set<std::pair<int, std::string>> loaded_;
  int widest_qkv_ = 0;  // of all layers
  int rounded_ = 0;
  bool keeps_exact_ = false;
};

}  // namespace embert
