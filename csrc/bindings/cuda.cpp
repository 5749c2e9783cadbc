// embert.engine._cuda: the encoder for Python. numpy in, numpy out; the GIL is released while the device works.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/status.h"
#include "encoder/encoder.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace embert {
namespace {

template <typename T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
// Columns in, columns out, activation.
using LinearLayer = std::tuple<int, int, std::string>;
// Activation and epsilon of the transform, how often log1p is applied, whether the decoder is the word table.
using SpladeTuple = std::tuple<std::string, float, int, bool>;
// Of a layer: window, RoPE columns, RoPE table.
using AttentionTuple = std::tuple<int, int, int>;

// The place of a name among these; raises Refused if it is none of them.
template <size_t n>
int index_of(const char* const (&names)[n], const std::string& name, const char* what) {
  const auto* const position = std::find(std::begin(names), std::end(names), name);
  if (position == std::end(names))
    throw Refused(std::string("the CUDA encoder does not know the ") + what + " " + name);
  return int(position - names);
}

DType dtype_of(const std::string& name) {
  constexpr const char* kNames[] = {"float32", "float16", "bfloat16", "int8"};  // DType's order
  return DType(index_of(kNames, name, "dtype"));
}

Activation activation_of(const std::string& name) {
  constexpr const char* kNames[] = {"gelu", "gelu_tanh", "relu", "silu"};  // Activation's order, after kNone
  return Activation(1 + index_of(kNames, name, "activation"));
}

Pooling pooling_of(const std::string& name) {
  constexpr const char* kNames[] = {"cls", "mean", "max", "last-token"};  // Pooling's order
  return Pooling(index_of(kNames, name, "pooling"));
}

std::vector<DenseShape> shapes_of(const std::vector<LinearLayer>& layers) {
  constexpr const char* kNames[] = {"identity", "tanh", "relu", "sigmoid", "gelu", "gelu_tanh"};  // in their order
  std::vector<DenseShape> shapes;
  for (const auto& [in, out, activation] : layers)
    shapes.push_back({in, out, HeadActivation(index_of(kNames, activation, "activation"))});
  return shapes;
}

std::unique_ptr<Encoder> make_encoder(
    int hidden, int layers, int heads, int kv_heads, int head_columns, int padded_head, int inner, int vocabulary,
    int positions, int types, bool position_table, bool padding, bool relative, int distance_rows, bool distance_keys,
    bool distance_queries, int embedding, bool projects_first, const std::vector<AttentionTuple>& attention,
    bool causal, bool qk_norm, float attention_scale, bool gated, bool pre_norm, bool first_norm, bool rms_norm,
    bool sublayer_norms, bool embedding_norm, float embedding_scale, const std::vector<int>& shared, float epsilon,
    const std::string& activation, const std::string& pooling, const std::string& classifier_pooling,
    const std::string& dtype, int device, int max_tokens, const std::string& gemm, const std::string& cublaslt_library,
    bool fold, int graphs, const std::vector<LinearLayer>& dense, const std::vector<LinearLayer>& classifier,
    const std::vector<LinearLayer>& multi, bool token_logits, bool token_norm, bool token_weights,
    const std::optional<SpladeTuple>& splade) {
  EncoderConfig model;
  model.hidden = hidden;
  model.layers = layers;
  model.heads = heads;
  model.kv_heads = kv_heads;
  model.head_columns = head_columns;
  model.padded_head = padded_head;
  model.inner = inner;
  model.vocabulary = vocabulary;
  model.positions = positions;
  model.types = types;
  model.position_table = position_table;
  model.padding = padding;
  model.relative = relative;
  model.distance_rows = distance_rows;
  model.distance_keys = distance_keys;
  model.distance_queries = distance_queries;
  model.embedding = embedding;
  model.projects_first = projects_first;
  for (const auto& [window, rotary_dim, table] : attention) model.attention.push_back({window, rotary_dim, table});
  model.causal = causal;
  model.qk_norm = qk_norm;
  model.attention_scale = attention_scale;
  model.gated = gated;
  model.pre_norm = pre_norm;
  model.first_norm = first_norm;
  model.rms_norm = rms_norm;
  model.sublayer_norms = sublayer_norms;
  model.embedding_norm = embedding_norm;
  model.embedding_scale = embedding_scale;
  model.shared = shared;
  model.epsilon = epsilon;
  model.dtype = dtype_of(dtype);
  if (model.dtype == DType::kInt8) {
    model.dtype = DType::kFloat16;
    model.int8 = true;
  }
  model.activation = activation_of(activation);
  model.pooling = pooling_of(pooling);
  model.classifier_pooling = pooling_of(classifier_pooling);
  model.task_heads = {shapes_of(dense), shapes_of(classifier), shapes_of(multi), token_weights,
                      std::nullopt,     token_logits,          token_norm};
  if (splade) {
    const auto& [transform_activation, norm_epsilon, logs, tied] = *splade;
    model.task_heads.splade = SpladeKind{activation_of(transform_activation), norm_epsilon, logs, tied};
  }
  EncoderOptions options;
  options.device = device;
  options.max_tokens = max_tokens;
  options.gemm = gemm;
  options.cublaslt_library = cublaslt_library;
  options.fold = fold;
  options.graphs = Tasks(graphs);
  std::unique_ptr<Encoder> created;
  nb::gil_scoped_release release;
  raise(Encoder::create(model, options, created));
  return created;
}

int64_t submit(Encoder& encoder, Vector<int32_t> ids, Vector<int32_t> cu_seqlens, std::optional<Vector<int32_t>> types,
               std::optional<Vector<int32_t>> positions, std::optional<Vector<int32_t>> dimensions,
               std::optional<Vector<bool>> normalize, std::optional<Vector<uint8_t>> tasks) {
  if (cu_seqlens.shape(0) < 1) throw Refused("cu_seqlens is empty");
  if (std::max(ids.shape(0), cu_seqlens.shape(0)) > size_t(INT32_MAX))
    throw Refused("a batch of over 2147483647 tokens");
  BatchView batch;
  batch.tokens = int(ids.shape(0));
  batch.sequences = int(cu_seqlens.shape(0)) - 1;
  if (types && types->shape(0) != ids.shape(0)) throw Refused("token_types must have as many elements as ids");
  if (positions && positions->shape(0) != ids.shape(0)) throw Refused("positions must have as many elements as ids");
  if (dimensions && int(dimensions->shape(0)) != batch.sequences)
    throw Refused("dimensions must have one element a sequence");
  if (normalize && int(normalize->shape(0)) != batch.sequences)
    throw Refused("normalize must have one element a sequence");
  if (tasks && int(tasks->shape(0)) != batch.sequences) throw Refused("tasks must have one element a sequence");
  batch.ids = ids.data();
  batch.cu_seqlens = cu_seqlens.data();
  batch.types = types ? types->data() : nullptr;
  batch.positions = positions ? positions->data() : nullptr;
  batch.dimensions = dimensions ? dimensions->data() : nullptr;
  batch.normalize = normalize ? reinterpret_cast<const uint8_t*>(normalize->data()) : nullptr;
  batch.tasks = tasks ? tasks->data() : nullptr;
  int64_t ticket = 0;
  nb::gil_scoped_release release;
  raise(encoder.submit(batch, ticket));
  return ticket;
}

// An array of numpy, which frees it; None without data.
template <typename T, typename Free>
nb::object owned(std::unique_ptr<T[], Free> data, std::initializer_list<size_t> shape) {
  if (data == nullptr) return nb::none();
  using Array = std::unique_ptr<T[], Free>;
  auto owned_array = std::make_unique<Array>(std::move(data));
  T* const address = owned_array->get();
  const nb::capsule owner(owned_array.get(), [](void* p) noexcept { delete static_cast<Array*>(p); });
  owned_array.release();
  return nb::cast(nb::ndarray<nb::numpy, T>(address, shape, owner));
}

nb::list wait(Encoder& encoder, int64_t ticket) {
  std::vector<Answer> answers;
  {
    nb::gil_scoped_release release;
    raise(encoder.wait(ticket, answers));
  }
  nb::list all;
  for (Answer& answer : answers) {
    const size_t rows = answer.rows, columns = answer.columns;
    all.append(nb::make_tuple(int(bit(answer.task)), owned(std::move(answer.values), {rows, columns}),
                              owned(std::move(answer.offsets), {answer.sequences + size_t(1)}),
                              owned(std::move(answer.indices), {rows})));
  }
  return all;
}

}  // namespace
}  // namespace embert

NB_MODULE(_cuda, m) {
  using namespace embert;
  m.doc() = "The CUDA encoder. Used through embert.engine.encoders.cuda.encoder.";
  bind_exceptions(m);

  m.def(
      "device_count",
      [] {
        int count = 0, driver = 0;
        if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0) throw Refused("no NVIDIA driver is installed");
        const cudaError_t code = cudaGetDeviceCount(&count);
        if (code != cudaSuccess && code != cudaErrorNoDevice) {
          cudaGetLastError();
          throw Refused(cudaGetErrorString(code));
        }
        return code == cudaSuccess ? count : 0;
      },
      "How many CUDA devices there are. Raises Refused where the driver cannot say.");
  m.def(
      "device_info",
      [](int device) {
        cudaDeviceProp properties{};
        raise(Status::cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties"));
        return nb::make_tuple(std::string(properties.name), properties.major * 10 + properties.minor,
                              size_t(properties.totalGlobalMem));
      },
      "device"_a, "Name, compute capability (90 for 9.0) and memory in bytes.");

  nb::class_<Encoder>(m, "Encoder")
      .def(
          "load",
          [](Encoder& encoder, const std::string& name, int layer, Vector<uint8_t> bytes,
             const std::vector<size_t>& shape, const std::string& dtype) {
            const DType stored = dtype_of(dtype);
            size_t expected = bytes_of(stored);
            for (const size_t size : shape) expected *= size;
            if (bytes.shape(0) != expected) throw nb::value_error("data must have as many bytes as its shape says");
            nb::gil_scoped_release release;
            raise(encoder.load(name, layer, bytes.data(), shape, stored));
          },
          "name"_a, "layer"_a, "data"_a, "shape"_a, "dtype"_a,
          "Upload one tensor of so many rows and columns, or elements; `data` must stay alive until start().")
      .def(
          "start",
          [](Encoder& encoder) {
            std::string fold_refusal;
            raise(encoder.start(fold_refusal));
            return fold_refusal;
          },
          nb::call_guard<nb::gil_scoped_release>(),
          "All weights are there: warm up and capture graphs. Answers empty, or why LayerNorms cannot be folded into "
          "these weights: the encoder is then not started.")
      .def("submit", &submit, "ids"_a, "cu_seqlens"_a, "token_types"_a.none(), "positions"_a.none(),
           "dimensions"_a.none(), "normalize"_a.none(), "tasks"_a.none() = nb::none(),
           "Start a forward. `tasks`: bits of engine/tasks.py a sequence; None: all EMBED. Answers a ticket.")
      .def("wait", &wait, "ticket"_a,
           "A tuple for each task that some sequence wanted: its bit, values [rows, columns], offsets [sequences + 1] "
           "or None, indices [rows] or None. Without offsets the sequences' lengths say which rows are whose.")
      .def_prop_ro("gemm", &Encoder::gemm_name)
      .def_prop_ro("folds", &Encoder::folds)
      .def_prop_ro("graphs", &Encoder::graph_count)
      .def_prop_ro(
          "memory",
          [](const Encoder& encoder) {
            const MemoryUse use = encoder.memory_use();
            return nb::make_tuple(use.weights, use.activations, use.total);
          },
          "Bytes of weights, bytes of activations and staging, bytes taken from the device in all.");
  m.def(
      "make_encoder", &make_encoder, nb::kw_only(), "hidden"_a, "layers"_a, "heads"_a, "kv_heads"_a, "head_columns"_a,
      "padded_head"_a, "inner"_a, "vocabulary"_a, "positions"_a, "types"_a, "position_table"_a, "padding"_a,
      "relative"_a, "distance_rows"_a, "distance_keys"_a, "distance_queries"_a, "embedding"_a, "projects_first"_a,
      "attention"_a, "causal"_a, "qk_norm"_a, "attention_scale"_a, "gated"_a, "pre_norm"_a, "first_norm"_a,
      "rms_norm"_a, "sublayer_norms"_a, "embedding_norm"_a, "embedding_scale"_a, "shared"_a, "epsilon"_a,
      "activation"_a, "pooling"_a, "classifier_pooling"_a, "dtype"_a, "device"_a, "max_tokens"_a, "gemm"_a,
      "cublaslt_library"_a, "fold"_a, "graphs"_a, "dense"_a, "classifier"_a, "multi"_a, "token_logits"_a,
      "token_norm"_a, "token_weights"_a, "splade"_a.none() = nb::none(),
      "As encoder/encoder_config.h. attention: window, RoPE columns and table of angles of each layer, or nothing. "
      "graphs: bits of the tasks whose small batches are captured, EMBED and CLASSIFY. dense, classifier, multi: "
      "linear layers (columns in, columns out, activation). splade: activation and epsilon of its transform, how often "
      "log1p is taken, whether the decoder is the word table. token_logits: multi computes logits of tokens, not "
      "vectors of "
      "length 1; token_norm: with a LayerNorm after its first layer. dtype int8: rows, tables and heads are in "
      "float16.");
}
