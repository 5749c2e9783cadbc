// A device that only writes down what it is asked to do: recording_device.h.

#include "recording_device.h"

#include <cstring>

#include "attention/attention.h"
#include "common/tensor_maps.h"
#include "gemm/gemm.h"
#include "heads/heads.h"
#include "heads/splade.h"
#include "ops/convolution.h"
#include "ops/elementwise.h"
#include "ops/embedding.h"
#include "ops/experts.h"
#include "ops/norm.h"

int pairs_of_text = 2;

namespace {

// The number of chosen elements, with the first and the last one; -1: all are chosen. The list was copied to the
// device.
void tell_chosen(const int* chosen, int count) {
  if (chosen == nullptr || count == 0)
    tell("chosen=-1\n");
  else
    tell("chosen=%d first=%d last=%d\n", count, chosen[0], chosen[count - 1]);
}

}  // namespace

namespace embert {

Status read_build(Build& build, const Stream&) {
  build = faults.build;
  return faults.told_build;
}
Status compute_offsets(const OffsetsInput&, const OffsetsOutput&, const OffsetsCapacity& capacity, const Stream&) {
  tell("offsets tokens=%d sequences=%d tiles=%d shorts=%d\n", capacity.tokens, capacity.sequences, capacity.tiles,
       capacity.shorts);
  return {};
}
Status embed(DType, const EmbeddingTables& tables, const int*, const int*, const int* positions, int rows, int columns,
             float, void* y, float2* sums, const Stream& stream) {
  tell("embedding rows=%d columns=%d positions=%ld y=%ld y_stats=%ld prescaled_rows=%d backwards=%d\n", rows, columns,
       at(positions), at(y), at(sums), tables.prescaled_rows, stream.backwards);
  return {};
}
Status embed_small(DType, const EmbeddingTables& tables, const OffsetsInput&, size_t bytes, const OffsetsOutput&,
                   const OffsetsCapacity& capacity, int, void* y, float2* sums, const Stream&) {
  tell("embedding_small rows=%d sequences=%d tiles=%d shorts=%d bytes=%zu y=%ld y_stats=%ld prescaled_rows=%d\n",
       capacity.tokens, capacity.sequences, capacity.tiles, capacity.shorts, bytes, at(y), at(sums),
       tables.prescaled_rows);
  return {};
}
Status layernorm(DType, const void* x, const Norm& norm, int rows, int, float, void* y, const Stream&) {
  tell("layernorm x=%ld rows=%d gamma=%ld y=%ld\n", at(x), rows, at(norm.gamma), at(y));
  return {};
}
bool layernorm_supports(DType, int) {
  return true;
}
bool attention_supports(const AttentionHeads&) {
  return true;
}
bool attention_writes_blocks(DType, const WindowedWork&, int, const TensorMaps*) {
  return false;
}
Status attention_in_blocks(const void*, int, const WindowedWork&, int, const RelativeScores&, const QuantizedBlocks&,
                           TensorMaps&, const Stream&) {
  return Status::refused("attention: no blocks");
}
Status attention(DType, const void* qkv, int rows, const WindowedWork& work, const AttentionHeads&,
                 const RelativeScores&, void* context, TensorMaps*, const Stream& stream) {
  if (fails(faults.attentions)) return faults.attention;
  tell("attention x=%ld rows=%d tiles=%d shorts=%d queries=%d window=%d ", at(qkv), rows, work.tile_count,
       work.short_count, int(work.queries), work.window);
  tell("y=%ld backwards=%d\n", at(context), stream.backwards);
  return {};
}
Status attention_sm80_disentangled(DType, const void* qkv, const AttentionWork& work, const AttentionHeads&,
                                   const DisentangledScores& positions, void* context, const Stream& stream) {
  tell(
      "disentangled_attention x=%ld tiles=%d shorts=%d queries=%d keys=%ld query_rows=%ld longest=%d y=%ld "
      "backwards=%d\n",
      at(qkv), work.tile_count, work.short_count, int(work.queries), at(positions.keys), at(positions.queries),
      positions.longest, at(context), stream.backwards);
  return {};
}
Status gather(DType, const void* context, int, const RowView& x, const int*, Pooling pooling, int sequences, int,
              void* context_to, void* x_to, float2* sums_to, const Stream&) {
  tell("gather x=%ld residual=%ld sums=%ld pooling=%d rows=%d y=%ld y_residual=%ld y_stats=%ld\n", at(context),
       at(x.data), at(x.stats), int(pooling), sequences, at(context_to), at(x_to), at(sums_to));
  return {};
}
Status pool(DType, Pooling pooling, const RowView& rows, bool gathered, const Norm& norm, float, const int*,
            const uint32_t* cuts, const int* chosen, int sequences, int longest, int, float* vectors, const Stream&) {
  tell("pool pooling=%d x=%ld sums=%ld gathered=%d normed=%d cut=%d rows=%d longest=%d y=%ld ", int(pooling),
       at(rows.data), at(rows.stats), gathered, norm.gamma != nullptr, cuts != nullptr, sequences, longest,
       at(vectors));
  tell_chosen(chosen, sequences);
  return {};
}
Status dense(const float* x, int rows, const DenseLayer& layer, float* y, int y_pitch, const Stream&) {
  tell("dense x=%ld rows=%d in=%d out=%d activation=%d weight=%ld bias=%ld y=%ld pitch=%d\n", at(x), rows,
       layer.shape.in, layer.shape.out, int(layer.shape.activation), at(layer.weight), at(layer.bias), at(y), y_pitch);
  return {};
}
Status cut_rows(const float* x, const uint32_t*, const int* chosen, int rows, int width, float* y, const Stream&) {
  tell("cut x=%ld rows=%d width=%d y=%ld ", at(x), rows, width, at(y));
  tell_chosen(chosen, rows);
  return {};
}
Status token_rows(DType, const void* x, const int* chosen, int rows, int columns, bool unit_length, float* y,
                  const Stream&) {
  tell("token_rows x=%ld rows=%d columns=%d unit_length=%d y=%ld ", at(x), rows, columns, unit_length, at(y));
  tell_chosen(chosen, rows);
  return {};
}
Status token_weights(DType, const RowView& x, const Norm& norm, float, const int* chosen, int rows, int,
                     const float* weight, const float* bias, float* y, const Stream&) {
  tell("token_weights x=%ld sums=%ld normed=%d rows=%d weight=%ld bias=%ld y=%ld ", at(x.data), at(x.stats),
       norm.gamma != nullptr, rows, at(weight), at(bias), at(y));
  tell_chosen(chosen, rows);
  return {};
}
Status row_offsets(const RowView&, int count, int, float, float*, const Stream&) {
  tell("row_offsets rows=%d\n", count);
  return {};
}
Status gate_rows(DType, Activation activation, const void* x, int rows, int columns, void* y, const Stream&) {
  tell("gate activation=%d x=%ld rows=%d columns=%d y=%ld\n", int(activation), at(x), rows, columns, at(y));
  return {};
}
Status rope_rows(DType, void* x, int rows, int pitch, const RopeColumns& of, const Stream&) {
  tell("rope x=%ld rows=%d pitch=%d head_size=%d rotary_dim=%d columns=%d table=%ld positions=%ld y=%ld\n", at(x), rows,
       pitch, of.head_size, of.rotary_dim, of.columns, at(of.table), at(of.positions), at(x));
  return {};
}
Status convolve_rows(DType, const void* x, const int*, const Convolution& by, int rows, int hidden, void* y,
                     const Stream&) {
  tell("convolution x=%ld rows=%d columns=%d taps=%d after=%d y=%ld\n", at(x), rows, hidden, by.taps, by.after, at(y));
  return {};
}
Status route_rows(DType, const void* x, const float*, int rows, int, const RoutedRows& routed, const Stream&) {
  tell("route x=%ld rows=%d experts=%d top_k=%d\n", at(x), rows, routed.kind.experts, routed.kind.top_k);
  return {};
}
Status combine_rows(DType, const void* x, const void* outputs, const RoutedRows&, const float*, const Norm&, int rows,
                    int, float, void* y, const Stream&) {
  tell("combine x=%ld outputs=%ld rows=%d y=%ld\n", at(x), at(outputs), rows, at(y));
  return {};
}
Status rmsnorm(DType, const void* x, const float* gamma, int rows, int, float, void* y, const Stream&) {
  tell("rmsnorm x=%ld rows=%d gamma=%ld y=%ld\n", at(x), rows, at(gamma), at(y));
  return {};
}
Status add_rmsnorm(DType, const void* x, const float* gamma, int rows, int, float, void* y, const float* before,
                   const float* after, float2* y_stats, const Stream&) {
  tell("add_rmsnorm x=%ld rows=%d gamma=%ld y=%ld before=%ld after=%ld y_stats=%ld\n", at(x), rows, at(gamma), at(y),
       at(before), at(after), at(y_stats));
  return {};
}
Status multiply_rmsnorm(DType, const void* x, const float* gamma, int rows, int, float, void* y, const Stream&) {
  tell("multiply_rmsnorm x=%ld rows=%d gamma=%ld y=%ld\n", at(x), rows, at(gamma), at(y));
  return {};
}
Status split_gamma(DType, void*, float*, int, int, const Stream&) {
  return {};
}
Status embed_words(DType, const void*, const int*, int rows, int columns, float, void* y, const float* after,
                   float2* y_stats, const Stream&) {
  tell("embed_words rows=%d columns=%d y=%ld after=%ld y_stats=%ld\n", rows, columns, at(y), at(after), at(y_stats));
  return {};
}
Status qk_norm_rope(DType, void* x, int rows, int pitch, const HeadNorms& norms, const RopeColumns& rope, int,
                    const Stream&) {
  tell("qk_norm x=%ld rows=%d pitch=%d heads=%d head_size=%d rotary_dim=%d columns=%d\n", at(x), rows, pitch,
       norms.heads, rope.head_size, rope.rotary_dim, rope.columns);
  return {};
}
bool rmsnorm_supports(DType, int) {
  return true;
}
bool qk_norm_supports(DType, int) {
  return true;
}
Status convert(DType, const void*, DType, void*, size_t count, const Stream&) {
  tell("convert count=%zu\n", count);
  return {};
}
Status TensorMaps::open() {
  return {};
}

namespace {

class RecordingLinear final : public Linear {
 public:
  explicit RecordingLinear(const LinearWeights& weights) : weights_(weights) { weights_.rope = nullptr; }
  Status run(const RowView& x, const RowView& residual, int rows, void* y, float2* y_stats, int& y_splits,
             const Stream& stream) override {
    EMBERT_TRY(check_operands(x, residual, y, y_stats));
    tell("linear in=%d out=%d rows=%d x=%ld sums=%ld parts=%d residual=%ld residual_sums=%ld y=%ld y_stats=%ld ",
         weights_.k, weights_.n, rows, at(x.data), at(x.stats), x.stats == nullptr ? 0 : x.splits, at(residual.data),
         at(residual.stats), at(y), at(y_stats));
    tell("backwards=%d\n", stream.backwards);
    y_splits = rows <= 100 ? 4 : 1;
    return {};
  }

 private:
  LinearWeights weights_;
};

class RecordingGemm final : public GemmProvider {
 public:
  RecordingGemm(bool folds, DType dtype) : folds_(folds), dtype_(dtype) {}
  const char* name() const override { return folds_ ? "hopper" : "cublaslt"; }
  Status prepare(const LinearWeights& weights, const Stream&, std::unique_ptr<Linear>& linear) override {
    tell("prepare in=%d out=%d exact=%ld prescaled_rows=%d normed=%ld residual_normed=%ld next_gamma=%ld ", weights.k,
         weights.n, at(weights.exact), weights.prescaled_rows, at(weights.input_norm.gamma),
         at(weights.residual_norm.gamma), at(weights.next_gamma));
    tell("weight=%ld activation=%d gated=%d ahead=%ld prefetch_bytes=%zu ", at(weights.weight), int(weights.activation),
         weights.gated, at(weights.prefetch_weights), weights.prefetch_bytes);
    tell("scales=%ld quantized=%ld quantized_scales=%ld ", at(weights.scales), at(weights.quantized.data),
         at(weights.quantized.scales));
    const int rows = (weights.gated ? 2 : 1) * weights.n;
    if (weights.exact != nullptr) {  // its first row, those a third and two thirds on, and its last element
      const size_t all = size_t(weights.k) * rows;
      tell("first=%d second=%d third=%d last=%d", int(weights.exact[0]), int(weights.exact[all / 3]),
           int(weights.exact[2 * (all / 3)]), int(weights.exact[all - 1]));
    }
    tell("\n");
    linear = std::make_unique<RecordingLinear>(weights);
    return {};
  }
  size_t workspace_bytes() const override { return 0; }
  bool dependent_launch() const override { return folds_; }
  bool folds() const override { return folds_; }
  bool fuses_rope() const override { return folds_; }
  bool fuses_gate() const override { return folds_; }
  bool has_int8() const override { return dtype_ == DType::kFloat16; }

 private:
  bool folds_;
  DType dtype_;
};

}  // namespace

namespace {

class RecordingMaxima final : public TextMaxima {
 public:
  Status run(const TextRows& of, float* maxima, const Stream&) override {
    tell("maxima x=%ld all_rows=%d row=%d rows=%d text=%d text_of=%ld y=%ld\n", at(of.x), of.all_rows, of.first_row,
         of.rows, of.first_text, at(of.text_of), at(maxima));
    return {};
  }
};

}  // namespace

Status make_portable_maxima(GemmProvider&, DType, const LinearWeights& weights, const Stream&,
                            std::unique_ptr<TextMaxima>& made) {
  tell("prepare_maxima in=%d out=%d weight=%ld\n", weights.k, weights.n, at(weights.weight));
  made = std::make_unique<RecordingMaxima>();
  return {};
}
Status begin_maxima(const TextSpan& span, int pitch, int* text_of, float* maxima, int*, const Stream&) {
  tell("begin_maxima chosen=%ld text=%d texts=%d end=%d pitch=%d text_of=%ld y=%ld\n", at(span.chosen), span.first,
       span.count, span.end_row, pitch, at(text_of), at(maxima));
  return {};
}
Status count_pairs(const float* maxima, int, int, int count, int*, int*, const Stream&) {
  tell("count_pairs x=%ld texts=%d\n", at(maxima), count);
  return {};
}
// Text i has `pairs_of_text` pairs: (i, 1), (i + 1, 1), … What does not fit is left out.
Status write_pairs(const float* maxima, int, int, int first, int count, const int*, const int*, const int64_t* before,
                   int64_t*, const PairBuffers& to, const Stream&) {
  tell("write_pairs x=%ld text=%d texts=%d goes_on=%d logs=%d\n", at(maxima), first, count, before != nullptr, to.logs);
  for (int text = first; text < first + count; ++text) {
    to.counts[text] = pairs_of_text;
    for (int64_t i = 0; int64_t(text + 1) * pairs_of_text <= to.capacity && i < pairs_of_text; ++i) {
      to.indices[int64_t(text) * pairs_of_text + i] = int(text + i);
      to.values[int64_t(text) * pairs_of_text + i] = 1.0f;
    }
  }
  return {};
}
Status make_sm90(DType dtype, std::unique_ptr<GemmProvider>& provider) {
  provider = std::make_unique<RecordingGemm>(true, dtype);
  return {};
}
Status make_cublaslt(DType dtype, const std::string&, std::unique_ptr<GemmProvider>& provider) {
  provider = std::make_unique<RecordingGemm>(false, dtype);
  return {};
}

}  // namespace embert

using namespace embert;

void check(const Status& status) {
  if (status.ok()) return;
  std::printf("refused %s\n", status.message().c_str());
  std::exit(0);
}

EncoderConfig small_model() {
  EncoderConfig model;
  model.hidden = kHidden;
  model.layers = kLayers;
  model.heads = kHeads;
  model.inner = kInner;
  model.vocabulary = kVocabulary;
  model.positions = kPositions;
  model.types = 1;
  return model;
}

EncoderConfig model_of(Kind kind) {
  EncoderConfig model = small_model();
  const auto newer = [&](int window, int tables) {
    model.position_table = false;
    model.gated = true;
    for (int i = 0; i < kLayers; ++i) {
      const bool global = i % 3 == 0;
      model.attention.push_back({global ? 0 : window, kRotaryDim, global ? 0 : tables - 1});
    }
  };
  switch (kind) {
    case Kind::kRelative:
      model.relative = true;
      model.positions = kRelativePositions;
      break;
    case Kind::kModern:
      newer(kWindow, 2);
      model.pre_norm = true;
      model.first_norm = false;
      break;
    case Kind::kNomic:
      newer(0, 1);
      model.activation = Activation::kSilu;
      break;
    case Kind::kGte:
      newer(0, 1);
      break;
    case Kind::kElectra:
      model.embedding = kEmbedding;
      break;
    case Kind::kAlbert:
      model.embedding = kEmbedding;
      model.shared.assign(kLayers, 0);
      model.activation = Activation::kGeluTanh;
      break;
    case Kind::kQwen:
      newer(0, 1);
      model.activation = Activation::kSilu;
      model.types = 0;
      model.kv_heads = kHeads / 2;
      model.head_columns = 2 * kHidden / kHeads;
      model.causal = model.qk_norm = model.pre_norm = model.rms_norm = true;
      model.embedding_norm = false;
      model.classifier_pooling = Pooling::kLast;
      break;
    case Kind::kJina:
      model.position_table = false;
      model.gated = true;
      model.relative = true;
      model.positions = kRelativePositions;
      break;
    default:
      break;
  }
  return model;
}

void load(Encoder& encoder, Stored stored, const std::string& without) {
  const EncoderConfig& model = encoder.model();
  const size_t embedding = model.embedding_columns();
  std::vector<float> floats(std::max({kVocabulary, kInner, kPositions}) * kHidden);
  const std::vector<uint16_t> zeros(floats.size());
  const auto put = [&](const std::string& name, int layer, const TensorShape& shape) {
    if (name == without) return;
    const std::string of_linear = name.substr(0, name.find('.'));
    const char* const names[] = {"query", "key", "value", "inner", "gate"};
    const auto* const found = std::find(std::begin(names), std::end(names), of_linear);
    const bool is_weight = name.find(".weight") != std::string::npos;
    float value = found == std::end(names) ? 0.0f : 10.0f * layer + 1 + (found - names);
    if (!is_weight) value = 0.0f;
    std::fill(floats.begin(), floats.end(), value);
    const bool is_vector = layer < 0 ? shape.size() == 1 : !is_weight;
    if (stored == Stored::kFloat32 || (stored == Stored::kVectorsInFloat32 && is_vector))
      check(encoder.load(name, layer, floats.data(), shape, DType::kFloat32));
    else
      check(encoder.load(name, layer, zeros.data(), shape, DType::kFloat16));
  };
  const auto linear = [&](const std::string& name, int layer, size_t out, size_t in) {
    put(name + ".weight", layer, {out, in});
    put(name + ".bias", layer, {out});
  };
  put("word", -1, {kVocabulary, embedding});
  if (model.position_table) put("position", -1, {size_t(model.positions), embedding});
  if (model.padding) put("padding", -1, {1, embedding});
  if (model.types > 0) put("type", -1, {1, embedding});
  if (model.embedding_norm) {
    put("gamma", -1, {embedding});
    put("beta", -1, {embedding});
  }
  if (model.embedding > 0) linear("projection", -1, kHidden, embedding);
  for (int layer = 0; layer < model.stored_layers(); ++layer) {
    const AttentionHeads heads = model.attention_heads(layer);
    const size_t queries = heads.columns(), keys = heads.key_columns(), head = heads.head_size;
    linear("query", layer, queries, kHidden);
    for (const std::string name : {"key", "value"}) linear(name, layer, keys, kHidden);
    linear("attention", layer, kHidden, queries);
    for (const std::string name : {"query_norm.gamma", "key_norm.gamma"}) {
      if (model.qk_norm) put(name, layer, {head});
    }
    if (model.gated) linear("gate", layer, kInner, kHidden);
    linear("inner", layer, kInner, kHidden);
    linear("out", layer, kHidden, kInner);
    for (const std::string name : {"attention.gamma", "attention.beta", "out.gamma", "out.beta"}) {
      if (name[0] == 'o' || model.has_attention_norm(layer)) put(name, layer, {kHidden});
    }
  }
  if (model.pre_norm) {
    put("last.gamma", -1, {kHidden});
    put("last.beta", -1, {kHidden});
  }
  const std::vector<int> tables = model.angle_tables();
  for (size_t i = 0; i < tables.size(); ++i) {
    const TensorShape shape = {size_t(model.positions), size_t(tables[i]), 2};
    check(encoder.load("angles", int(i), floats.data(), shape, DType::kFloat32));
  }
}

void load_heads(Encoder& encoder) {
  const TaskHeads& heads = encoder.model().task_heads;
  const auto put = [&](const std::string& name, int index, const TensorShape& shape) {
    size_t count = 1;
    for (const size_t size : shape) count *= size;
    check(encoder.load(name, index, std::vector<float>(count).data(), shape, DType::kFloat32));
  };
  const auto layers = [&](const std::string& name, const std::vector<DenseShape>& shapes) {
    for (size_t i = 0; i < shapes.size(); ++i) {
      put(name + ".weight", int(i), {size_t(shapes[i].out), size_t(shapes[i].in)});
      put(name + ".bias", int(i), {size_t(shapes[i].out)});
    }
  };
  layers("dense", heads.dense);
  layers("classifier", heads.classifier);
  layers("multi", heads.multi);
  if (heads.token_norm) {
    put("multi.gamma", -1, {kHidden});
    put("multi.beta", -1, {kHidden});
  }
  if (heads.token_weights) {
    put("token_weights.weight", -1, {1, kHidden});
    put("token_weights.bias", -1, {1});
  }
  if (!heads.splade) return;
  put("splade.transform.weight", -1, {kHidden, kHidden});
  for (const std::string name : {"transform.bias", "transform.gamma", "transform.beta"})
    put("splade." + name, -1, {kHidden});
  put("splade.decoder.bias", -1, {kVocabulary});
}
