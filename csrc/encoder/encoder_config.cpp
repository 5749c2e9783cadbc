#include "encoder/encoder_config.h"

#include <algorithm>

#include "attention/attention.h"
#include "ops/convolution.h"
#include "ops/elementwise.h"
#include "ops/experts.h"
#include "ops/norm.h"
#include "ops/quantize.h"

namespace embert {
namespace {

constexpr int kMaxHeadColumns = 65536;  // of a linear layer of a head
constexpr int kMaxMultiColumns = 8192;

template <typename... Parts>
Status refuse(const Parts&... parts) {
  return Status::refused("the CUDA encoder cannot run ", parts...);
}

}  // namespace

int EncoderConfig::stored_layers() const {
  return shared.empty() ? layers : 1 + *std::max_element(shared.begin(), shared.end());
}

bool EncoderConfig::shares_prefixes() const {
  for (int layer = 0; layer < layers; ++layer) {
    if (convolves(layer) || attention_heads(layer).head_size > kMaxTileHead) return false;
  }
  return causal && !relative && distance_rows == 0 && !int8 && task_heads.options == 0;
}

std::vector<int> EncoderConfig::angle_tables() const {
  std::vector<int> columns;
  for (const LayerAttention& each : attention) {
    if (each.rotary_dim == 0) continue;
    columns.resize(std::max(columns.size(), size_t(each.table) + 1));
    columns[each.table] = each.rotary_dim / 2;
  }
  return columns;
}

Status EncoderConfig::check() const {
  EMBERT_TRY(check_attention());
  EMBERT_TRY(check_norms());
  EMBERT_TRY(check_layer_inputs());
  if (inner <= 0 || inner % 8 != 0) return refuse("intermediate size ", inner, ": it must be a multiple of 8");
  if (layers < 1 || vocabulary < 1 || max_length() < 1 || types < 0)
    return refuse("a model without layers, vocabulary or positions");
  EMBERT_TRY(check_layers());
  EMBERT_TRY(check_int8());
  EMBERT_TRY(check_experts());
  return check_heads();
}

Status EncoderConfig::check_attention() const {
  if (hidden <= 0 || heads <= 0 || (head_columns == 0 && hidden % heads != 0))
    return refuse("hidden size ", hidden, " with ", heads, " heads");
  if (kv_heads < 0 || heads % key_heads() != 0)
    return refuse(heads, " heads of queries that share ", kv_heads, " of keys and values");
  const bool is_plain = head_columns == 0 && key_heads() == heads && !causal && !qk_norm && attention_scale == 0.0f;
  if (padded_head != 0 && (padded_head < hidden / heads || int8 || !angle_tables().empty() || !is_plain))
    return refuse("heads of ", hidden / heads, " columns, padded to ", padded_head,
                  (int8 ? ", in int8" : ", with rotary positions or a decoder's attention"));
  if (distance_rows != 0) EMBERT_TRY(check_distances());
  if (relative && (!is_plain || head_size() > 128))
    return refuse("scores by relative position with a decoder's attention, or with heads of over 128 columns");
  if (value_norm && !qk_norm) return refuse("norms of values without norms of queries and keys");
  return {};
}

Status EncoderConfig::check_heads_of(int layer) const {
  const AttentionHeads of = attention_heads(layer);
  const LayerAttention own = attention_of(layer);
  const int most = dtype == DType::kFloat32 ? kMaxFloat32Head : kMaxHeadSize;
  if (!attention_supports(of) || of.head_size > most)
    return refuse("heads of ", of.head_size, " columns: they must be a multiple of 8 of at most ", most);
  if ((own.head_columns != 0 || own.kv_heads != 0) &&
      (padded_head != 0 || relative || distance_rows > 0 || int8 || !shared.empty()))
    return refuse("layers whose heads differ, in int8, with shared layers, or with scores by position");
  if (qk_norm && !qk_norm_supports(dtype, of.head_size))
    return refuse("norms of queries and keys of ", of.head_size, " columns");
  return {};
}

Status EncoderConfig::check_layer_inputs() const {
  if (layer_inputs == 0) return {};
  if (layer_inputs < 0 || layer_inputs % 8 != 0 || !rmsnorm_supports(dtype, layer_inputs))
    return refuse("inputs of layers of ", layer_inputs, " columns: they must be a multiple of 8 of at most ",
                  max_rms_columns(dtype));
  if (!sublayer_norms || !shared.empty())
    return refuse("inputs of layers without norms after a layer's parts, or of shared layers");
  return {};
}

Status EncoderConfig::check_distances() const {
  const auto differs = [](const LayerAttention& each) {
    return each.window > 0 || each.rotary_dim > 0 || each.taps > 0;
  };
  if (dtype == DType::kFloat32 || int8)
    return refuse("disentangled attention in ", (int8 ? "int8" : "float32"), ": choose float16 or bfloat16");
  if (!distance_keys && !distance_queries) return refuse("disentangled attention without a part of the scores");
  if (distance_rows < 0 || distance_rows > kMaxDistanceRows)
    return refuse("disentangled attention with a table of ", distance_rows, " rows: at most ", kMaxDistanceRows,
                  " are taken");
  if (head_size() > kMaxDisentangledHead || padded_head != 0)
    return refuse("disentangled attention in heads of ", hidden / heads,
                  " columns: they must be a multiple of 8 of at most ", kMaxDisentangledHead);
  if (head_columns != 0 || key_heads() != heads || causal || qk_norm || relative || !shared.empty() ||
      std::any_of(attention.begin(), attention.end(), differs))
    return refuse("disentangled attention with another kind of attention or of positions");
  return {};
}

Status EncoderConfig::check_norms() const {
  const bool supported = rms_norm ? rmsnorm_supports(dtype, hidden) : layernorm_supports(dtype, hidden);
  if (!supported || hidden % 8 != 0)
    return refuse("hidden size ", hidden, ": it must be a multiple of 8 of at most ",
                  rms_norm                   ? max_rms_columns(dtype)
                  : dtype == DType::kFloat32 ? 1024
                                             : 2048);
  if (rms_norm && !pre_norm) return refuse("norms that do not subtract the mean, after a layer's parts");
  if (sublayer_norms && !rms_norm) return refuse("LayerNorms before and after a layer's parts");
  if (continues) {
    if (!pre_norm || rms_norm || embedding_norm || position_table || types < 1 || embedding > 0 || int8)
      return refuse("layers after an encoder with other norms or tables than a decider's");
    return {};
  }
  if (embedding_norm == rms_norm)
    return refuse(rms_norm ? "an RMSNorm of embeddings" : "embeddings without a norm before LayerNorms");
  if (!embedding_norm && (position_table || types > 0 || embedding > 0))
    return refuse("embeddings of positions or types, or narrower ones, without a norm");
  if (projects_first && (embedding == 0 || position_table || types > 0 || !embedding_norm || pre_norm))
    return refuse("embeddings of positions or types that are projected before their norm");
  if (embedding_norm && embedding_scale != 1.0f)
    return refuse("embeddings that are scaled by ", embedding_scale, " before a norm");
  return {};
}

Status EncoderConfig::check_int8() const {
  if (!int8) return {};
  if (dtype != DType::kFloat16) return refuse("matrices in int8 with rows in another type than float16");
  if (gated || pre_norm || embedding > 0 || !shared.empty() || !angle_tables().empty())
    return refuse(
        "gates, rotary positions, LayerNorms before a layer's parts, narrower embeddings or shared layers in int8");
  if (quantize_supports(hidden, true) && quantize_supports(inner, false)) return {};
  return refuse("hidden size ", hidden, " and intermediate size ", inner, " in int8: they must be multiples of ",
                kQuantizedStep, " of at most ", kMaxStatColumns, " and ", kMaxQuantized);
}

Status EncoderConfig::check_experts() const {
  if (expert_layers.empty()) return {};
  if (experts < 1 || experts > kMaxExperts || top_k < 1 || top_k > experts)
    return refuse(top_k, " of ", experts, " experts a token: at most ", kMaxExperts, " are taken");
  const auto exists = [&](int layer) { return layer >= 0 && layer < layers; };
  if (!std::all_of(expert_layers.begin(), expert_layers.end(), exists)) return refuse("experts of a missing layer");
  if (gated || pre_norm || int8 || !shared.empty())
    return refuse("experts with gates, norms before a layer's parts, shared layers or in int8");
  return {};
}

Status EncoderConfig::check_layers() const {
  if (embedding < 0 || (embedding > 0 && !layernorm_supports(dtype, embedding)) || embedding_columns() % 8 != 0)
    return refuse("embeddings of ", embedding, " columns: they must be a multiple of 8");
  if (activation == Activation::kSilu && !gated) return refuse("silu in a feed-forward part without a gate");
  if (padding && !position_table) return refuse("positions of padding without a table of positions");
  if (task_heads.splade && task_heads.splade->tied && embedding > 0)
    return refuse("a SPLADE head whose decoder is a word table of ", embedding, " columns");
  if (!attention.empty() && int(attention.size()) != layers)
    return refuse("attention described for ", attention.size(), " of ", layers, " layers");
  if (!shared.empty() && int(shared.size()) != layers)
    return refuse("weights named for ", shared.size(), " of ", layers, " layers");
  for (int i = 0; i < stored_layers() && !shared.empty(); ++i) {
    if (std::find(shared.begin(), shared.end(), i) == shared.end())
      return refuse("weights of layer ", i, ", which no layer uses");
  }
  for (int i = 0; i < layers; ++i) {
    const LayerAttention layer_attention = attention_of(i);
    EMBERT_TRY(check_heads_of(i));
    const int head_columns = attention_heads(i).head_size;
    if (layer_attention.window < 0 || (layer_attention.window > 0 && relative))
      return refuse("a window of ", layer_attention.window, " tokens together with scores by relative position");
    if (layer_attention.rotary_dim < 0 || layer_attention.rotary_dim % 2 != 0 ||
        layer_attention.rotary_dim > head_columns || layer_attention.table < 0 || layer_attention.table >= layers)
      return refuse(layer_attention.rotary_dim, " RoPE columns of heads of ", head_columns);
    if (layer_attention.rotary_dim > 0 && angle_tables()[layer_attention.table] != layer_attention.rotary_dim / 2)
      return refuse("one table of angles for different numbers of RoPE columns");
    if (layer_attention.taps < 0 || layer_attention.taps > kMaxTaps || layer_attention.after < 0 ||
        layer_attention.after >= std::max(layer_attention.taps, 1))
      return refuse("a convolution of ", layer_attention.taps, " taps, of which ", layer_attention.after,
                    " are of later rows: at most ", kMaxTaps, " are taken");
    if (layer_attention.taps > 0 && (position_table || int8 || !shared.empty()))
      return refuse("convolutions with a table of positions, in int8 or with shared layers");
    if (stored(i) < 0 || stored(i) >= layers) return refuse("weights of layer ", stored(i));
    for (int other = 0; other < i; ++other) {
      if (stored(other) == stored(i) && attention_of(other).rotary_dim != layer_attention.rotary_dim)
        return refuse("layers that share weights and rotate different columns");
    }
  }
  return {};
}

Status EncoderConfig::check_heads() const {
  const auto chain = [&](const char* name, const std::vector<DenseShape>& layers) -> Status {
    int columns = hidden;
    for (const DenseShape& layer : layers) {
      if (layer.in != columns || layer.out < 1 || layer.out > kMaxHeadColumns)
        return refuse(name, " of ", layer.in, " columns to ", layer.out, " after ", columns, " columns; at most ",
                      kMaxHeadColumns, " are taken");
      columns = layer.out;
    }
    return {};
  };
  if (classifier_pooling != Pooling::kCls && classifier_pooling != Pooling::kLast)
    return refuse("a classification head on another row than the first or the last");
  if (rms_norm && task_heads.splade) return refuse("a SPLADE head after RMSNorm");
  if (task_heads.splade && task_heads.splade->logs != 1 && task_heads.splade->logs != 2)
    return refuse("a SPLADE head that takes log1p ", task_heads.splade->logs, " times: once or twice");
  if (task_heads.token_weights && task_heads.splade) return refuse("token weights next to a SPLADE head");
  if (task_heads.options > 0 && !task_heads.classifier.empty())
    return refuse("a decider next to a classification head");
  if (task_heads.label_mass && (pooling != Pooling::kLast || embedding > 0))
    return refuse("logits of a vocabulary from another row than the last token's, or with narrower embeddings");
  EMBERT_TRY(chain("a Dense module", task_heads.dense));
  EMBERT_TRY(chain("a classification layer", task_heads.classifier));
  EMBERT_TRY(chain("a multi-vector layer", task_heads.multi));
  for (const DenseShape& layer : task_heads.multi) {
    if (layer.out % 8 != 0 || layer.out > kMaxMultiColumns)
      return refuse("a multi-vector layer of ", layer.out, " columns: it must be a multiple of 8 of at most ",
                    kMaxMultiColumns);
    if (layer.activation == HeadActivation::kTanh || layer.activation == HeadActivation::kSigmoid)
      return refuse("a multi-vector layer with tanh or sigmoid");
  }
  if (task_heads.token_norm &&
      (task_heads.multi.size() != 2 || task_heads.multi[0].out != hidden || !layernorm_supports(dtype, hidden)))
    return refuse("a LayerNorm in a head of tokens that is not between two layers of the hidden size");
  return {};
}

}  // namespace embert
