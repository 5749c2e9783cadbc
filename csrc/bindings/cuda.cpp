// embert.engine._cuda: the encoder for Python. numpy in, numpy out; the GIL is released while the device works.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/status.h"
#include "encoder/encoder.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace embert {
namespace {

template <typename T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Prefixes = nb::ndarray<const int32_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;
using Spans = nb::ndarray<const int32_t, nb::shape<-1, 4>, nb::c_contig, nb::device::cpu>;

// Enums of Python with the names that engine/ has for their values.
template <typename Enum>
void bind_enum(nb::module_& m, const char* name, std::initializer_list<std::pair<const char*, Enum>> values) {
  nb::enum_<Enum> bound(m, name);
  for (const auto& [value_name, value] : values) bound.value(value_name, value);
}

void bind_enums(nb::module_& m) {
  bind_enum<DType>(m, "DType",
                   {{"float32", DType::kFloat32},
                    {"float16", DType::kFloat16},
                    {"bfloat16", DType::kBFloat16},
                    {"int8", DType::kInt8}});
  bind_enum<Activation>(m, "Activation",
                        {{"gelu", Activation::kGeluErf},
                         {"gelu_tanh", Activation::kGeluTanh},
                         {"relu", Activation::kRelu},
                         {"silu", Activation::kSilu}});
  bind_enum<HeadActivation>(m, "HeadActivation",
                            {{"identity", HeadActivation::kIdentity},
                             {"tanh", HeadActivation::kTanh},
                             {"relu", HeadActivation::kRelu},
                             {"sigmoid", HeadActivation::kSigmoid},
                             {"gelu", HeadActivation::kGelu},
                             {"gelu_tanh", HeadActivation::kGeluTanh}});
  bind_enum<Pooling>(
      m, "Pooling",
      {{"cls", Pooling::kCls}, {"mean", Pooling::kMean}, {"max", Pooling::kMax}, {"last-token", Pooling::kLast}});
}

// Descriptions, whose fields Python sets; a field that is not set has its default of C++.
void bind_descriptions(nb::module_& m) {
  nb::class_<LayerAttention>(m, "LayerAttention")
      .def(nb::init<int, int, int, int, int, int, int>(), "window"_a, "rotary_dim"_a, "table"_a, "head_columns"_a = 0,
           "kv_heads"_a = 0, "taps"_a = 0, "after"_a = 0);
  nb::class_<DenseShape>(m, "DenseShape").def(nb::init<int, int, HeadActivation>());
  nb::class_<SpladeKind>(m, "SpladeKind").def(nb::init<Activation, float, int, bool>());
  nb::class_<TaskHeads>(m, "TaskHeads")
      .def(nb::init<>())
      .def_rw("dense", &TaskHeads::dense)
      .def_rw("classifier", &TaskHeads::classifier)
      .def_rw("multi", &TaskHeads::multi)
      .def_rw("token_weights", &TaskHeads::token_weights)
      .def_rw("splade", &TaskHeads::splade, nb::arg().none())
      .def_rw("token_logits", &TaskHeads::token_logits)
      .def_rw("token_norm", &TaskHeads::token_norm)
      .def_rw("options", &TaskHeads::options)
      .def_rw("marker", &TaskHeads::marker)
      .def_rw("text_types", &TaskHeads::text_types)
      .def_rw("label_mass", &TaskHeads::label_mass)
      .def_rw("tied_vocabulary", &TaskHeads::tied_vocabulary);
  nb::class_<EncoderConfig> config(m, "EncoderConfig");
  config.def(nb::init<>());
#define EMBERT_FIELD(type, name, ...) config.def_rw(#name, &EncoderConfig::name);
#include "encoder/encoder_config_fields.inc"
#undef EMBERT_FIELD
  nb::class_<EncoderOptions>(m, "EncoderOptions")
      .def(nb::init<>())
      .def_rw("device", &EncoderOptions::device)
      .def_rw("max_tokens", &EncoderOptions::max_tokens)
      .def_rw("gemm", &EncoderOptions::gemm)
      .def_rw("cublaslt_library", &EncoderOptions::cublaslt_library)
      .def_rw("fold", &EncoderOptions::fold)
      .def_rw("graphs", &EncoderOptions::graphs);
}

std::unique_ptr<Encoder> make_encoder(const EncoderConfig& config, const EncoderOptions& options,
                                      const EncoderConfig* decider) {
  std::unique_ptr<Encoder> created;
  nb::gil_scoped_release release;
  raise(Encoder::create(config, options, created, decider));
  return created;
}

int64_t submit(Encoder& encoder, Vector<int32_t> ids, Vector<int32_t> cu_seqlens, std::optional<Vector<int32_t>> types,
               std::optional<Vector<int32_t>> positions, std::optional<Vector<int32_t>> dimensions,
               std::optional<Vector<bool>> normalize, std::optional<Vector<uint8_t>> tasks,
               std::optional<Prefixes> prefixes, std::optional<Spans> spans, std::optional<Vector<int32_t>> rows,
               std::optional<Vector<int32_t>> attended) {
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
  if (prefixes && int(prefixes->shape(0)) != batch.sequences) throw Refused("prefixes must have one row a sequence");
  if (attended && int(attended->shape(0)) != batch.sequences)
    throw Refused("attended must have one element a sequence");
  if (spans.has_value() != rows.has_value()) throw Refused("spans and rows must come together");
  batch.ids = ids.data();
  batch.cu_seqlens = cu_seqlens.data();
  batch.types = types ? types->data() : nullptr;
  batch.positions = positions ? positions->data() : nullptr;
  batch.dimensions = dimensions ? dimensions->data() : nullptr;
  batch.normalize = normalize ? reinterpret_cast<const uint8_t*>(normalize->data()) : nullptr;
  batch.tasks = tasks ? tasks->data() : nullptr;
  batch.prefixes = prefixes ? prefixes->data() : nullptr;
  batch.attended = attended ? attended->data() : nullptr;
  if (spans && rows) batch.scored = {int(spans->shape(0)), int(rows->shape(0)), spans->data(), rows->data()};
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
  std::vector<Result> results;
  {
    nb::gil_scoped_release release;
    raise(encoder.wait(ticket, results));
  }
  nb::list all;
  for (Result& result : results) {
    const size_t rows = result.rows, columns = result.columns;
    all.append(nb::make_tuple(int(bit(result.task)), owned(std::move(result.values), {rows, columns}),
                              owned(std::move(result.offsets), {result.sequences + size_t(1)}),
                              owned(std::move(result.indices), {rows})));
  }
  return all;
}

}  // namespace
}  // namespace embert

NB_MODULE(_cuda, m) {
  using namespace embert;
  m.doc() = "The CUDA encoder. Used through embert.engine.encoders.cuda.encoder.";
  bind_exceptions(m);
  bind_enums(m);
  bind_descriptions(m);

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
      "Number of CUDA devices. Raises Refused if the driver does not report it.");
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
             const std::vector<size_t>& shape, DType stored) {
            size_t expected = bytes_of(stored);
            for (const size_t size : shape) expected *= size;
            if (bytes.shape(0) != expected) throw nb::value_error("data must have as many bytes as its shape says");
            nb::gil_scoped_release release;
            raise(encoder.load(name, layer, bytes.data(), shape, stored));
          },
          "name"_a, "layer"_a, "data"_a, "shape"_a, "dtype"_a,
          "Upload one tensor of this shape; `data` must stay alive until start().")
      .def(
          "start",
          [](Encoder& encoder) {
            std::string fold_refusal;
            raise(encoder.start(fold_refusal));
            return fold_refusal;
          },
          nb::call_guard<nb::gil_scoped_release>(),
          "Warm up and capture graphs, after all weights are loaded. Returns an empty string, or the reason why "
          "LayerNorms cannot be folded into these weights: the encoder is then not started.")
      .def("submit", &submit, "ids"_a, "cu_seqlens"_a, "token_types"_a.none(), "positions"_a.none(),
           "dimensions"_a.none(), "normalize"_a.none(), "tasks"_a.none() = nb::none(), "prefixes"_a.none() = nb::none(),
           "spans"_a.none() = nb::none(), "rows"_a.none() = nb::none(), "attended"_a.none() = nb::none(),
           "Start a forward. `tasks`: bits of engine/tasks.py a sequence; None: all EMBED. `prefixes`: those of "
           "engine/batch.py. `spans`, `rows`, `attended`: engine/heads/late_interaction.py. Returns a ticket.")
      .def(
          "wait", &wait, "ticket"_a,
          "A tuple for each task that some sequence requests: its bit, values [rows, columns], offsets [sequences + 1] "
          "or None, indices [rows] or None. Without offsets the sequences' lengths determine their rows.")
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
  m.def("make_encoder", &make_encoder, "config"_a, "options"_a, "decider"_a.none() = nb::none(),
        "An encoder without weights, with the layers after it that make decisions. Raises Refused for a config that it "
        "does not run.");
}
