// embert.engine._cpu: kernels for the CPU encoder. Addresses of float32 rows in and out; the GIL is released.
//
// Compiled for any x86-64 or aarch64: Python calls `select`, and then only kernels that this CPU can run.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/address.h"
#include "cpu/kernels.h"
#include "cpu/layer.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace embert::cpu {
namespace {

template <typename T, int kDimensions>
using Array = nb::ndarray<const T, nb::ndim<kDimensions>, nb::c_contig, nb::device::cpu>;

// A group's start, sequences, length and keys; 0 keys means all.
using GroupTuple = std::tuple<int, int, int, int>;
// Gamma, beta and epsilon.
using NormTuple = std::tuple<Array<float, 1>, Array<float, 1>, float>;

Norm norm_of(const NormTuple& norm, int hidden) {
  const auto& [gamma, beta, epsilon] = norm;
  if (gamma.shape(0) != std::size_t(hidden) || beta.shape(0) != std::size_t(hidden)) {
    throw nb::value_error("a norm does not fit the layer");
  }
  return {gamma.data(), beta.data(), epsilon};
}

// Kernels of an instruction set.
struct InstructionSet {
  const char* name;
  const Kernels* kernels;
  const Kernels* int8_kernels;  // for int8_linear
  bool supported;               // by this CPU
};

// The instruction sets of this architecture; each has those before it.
std::vector<InstructionSet> instruction_sets() {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  return {{"AVX2", &avx2::kKernels, &avx2::kKernels, avx2},
          {"AVX512", &avx512::kKernels, &avx2::kKernels, avx512},
          {"AVX512_VNNI", &avx512::kKernels, &avx512::kKernels, vnni}};
#elif defined(__aarch64__)
  const bool dot = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
  return {{"NEON", &neon::kKernels, &neon::kKernels, true},
          {"NEON_DOT", &neon_dot::kKernels, &neon_dot::kKernels, dot}};
#endif
}

std::vector<std::string> names_of_instruction_sets() {
  std::vector<std::string> names;
  for (const InstructionSet& set : instruction_sets()) names.push_back(set.name);
  return names;
}

const Kernels* kernels = nullptr;       // the selected ones
const Kernels* int8_kernels = nullptr;  // for int8_linear

// Selects the best kernels that this CPU has, up to those of the instruction set `limit`, empty for all; returns the
// name of theirs, empty if it has none.
std::string select_kernels(const std::string& limit) {
  std::string selected;
  for (const InstructionSet& set : instruction_sets()) {
    if (set.supported) {
      selected = set.name;
      kernels = set.kernels;
      int8_kernels = set.int8_kernels;
    }
    if (set.name == limit) break;
  }
  return selected;
}

Activation activation_of(const std::string& name) {
  const char* const names[] = {"none", "gelu", "gelu_tanh", "relu", "silu"};  // Activation's order
  const auto* const position = std::find(std::begin(names), std::end(names), name);
  if (position == std::end(names)) throw nb::value_error(("no activation is called " + name).c_str());
  return static_cast<Activation>(position - names);
}

// Checked once, when a layer is created; the calls pass addresses.
void check_widths(std::size_t out, std::size_t bias, std::size_t scales) {
  if (bias != out || scales != out) throw nb::value_error("weight, scales and bias differ in their rows");
}

void apply(const LinearLayer& layer, Address x, int rows, Address y, Activation activation, Address residual,
           Address gate, int threads) {
  const Epilogue epilogue{activation, residual, gate};
  layer(x, rows, epilogue, y, threads);
}

}  // namespace
}  // namespace embert::cpu

NB_MODULE(_cpu, module) {
  using namespace embert::cpu;
  using embert::Address;
  module.doc() = "Kernels of the CPU encoder.";
  select_kernels("");
  nb::set_leak_warnings(false);  // processes end while encoders exist
  module.def("instruction_sets", &names_of_instruction_sets);
  module.def("select", &select_kernels, "limit"_a);
  module.def("lanes", [] { return kernels->lanes; });

  nb::enum_<Activation>(module, "Activation")
      .value("NONE", Activation::kNone)
      .value("GELU", Activation::kGelu)
      .value("GELU_TANH", Activation::kGeluTanh)
      .value("RELU", Activation::kRelu)
      .value("SILU", Activation::kSilu);
  module.def("activation", &activation_of, "name"_a);

  nb::class_<LinearLayer>(module, "LinearLayer")
      .def("__call__", &apply, "x"_a, "rows"_a, "y"_a, "activation"_a, "residual"_a, "gate"_a, "threads"_a,
           nb::call_guard<nb::gil_scoped_release>());
  module.def(
      "linear",
      [](const Array<float, 2>& weight, const Array<float, 1>& bias) {
        check_widths(weight.shape(0), bias.shape(0), bias.shape(0));
        return kernels->linear(weight.data(), bias.data(), int(weight.shape(0)), int(weight.shape(1)));
      },
      "weight"_a.noconvert(), "bias"_a.noconvert());
  module.def(
      "int8_linear",
      [](const Array<std::int8_t, 2>& weight, const Array<float, 1>& scales, const Array<float, 1>& bias) {
        check_widths(weight.shape(0), bias.shape(0), scales.shape(0));
        return int8_kernels->int8_linear(weight.data(), scales.data(), bias.data(), int(weight.shape(0)),
                                         int(weight.shape(1)));
      },
      "weight"_a.noconvert(), "scales"_a.noconvert(), "bias"_a.noconvert());

  nb::class_<Layer>(module, "Layer")
      .def(
          "__init__",
          [](Layer* self, const LinearLayer& qkv, const LinearLayer& projection, const LinearLayer& inner,
             const LinearLayer& outer, Activation activation, const NormTuple& attention_norm, const NormTuple& norm,
             int heads) {
            const int hidden = outer.out();
            if (heads < 1 || hidden % heads != 0 || qkv.in() != hidden || qkv.out() != 3 * hidden ||
                projection.in() != hidden || projection.out() != hidden || inner.in() != hidden ||
                inner.out() != outer.in()) {
              throw nb::value_error("the linear layers do not fit each other");
            }
            new (self) Layer(*kernels, qkv, projection, inner, outer, activation, norm_of(attention_norm, hidden),
                             norm_of(norm, hidden), heads);
          },
          "qkv"_a, "projection"_a, "inner"_a, "outer"_a, "activation"_a, "attention_norm"_a, "norm"_a, "heads"_a,
          nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>())
      .def(
          "__call__",
          [](const Layer& layer, Address x, int rows, const std::vector<GroupTuple>& groups, Address bias, int longest,
             int window, Address y, int threads) {
            std::vector<SequenceGroup> token_groups;
            token_groups.reserve(groups.size());
            for (const auto& [start, sequences, length, keys] : groups) {
              token_groups.push_back({start, sequences, length, keys ? keys : length});
            }
            Positions positions;
            positions.bias = bias;
            positions.longest = longest;
            positions.window = window;
            const nb::gil_scoped_release released;
            layer(x, rows, token_groups, positions, y, threads);
          },
          "x"_a, "rows"_a, "groups"_a, "bias"_a, "longest"_a, "window"_a, "y"_a, "threads"_a);

  module.def(
      "normalize",
      [](Address x, int rows, int columns, Address gamma, Address beta, float epsilon, Address y, int threads) {
        kernels->normalize(x, rows, columns, gamma, beta, epsilon, y, threads);
      },
      "x"_a, "rows"_a, "columns"_a, "gamma"_a, "beta"_a, "epsilon"_a, "y"_a, "threads"_a,
      nb::call_guard<nb::gil_scoped_release>());
  module.def(
      "embed",
      [](Address ids, Address position_ids, int tokens, const Array<float, 2>& words, const Array<float, 2>& positions,
         Address gamma, Address beta, float epsilon, Address y, int threads) {
        const Table word_table{words.data(), std::int64_t(words.shape(0))};
        const Table position_table{positions.data(), std::int64_t(positions.shape(0))};
        const nb::gil_scoped_release released;
        if (!kernels->embed(ids, position_ids, tokens, word_table, position_table, int(words.shape(1)), gamma, beta,
                            epsilon, y, threads)) {
          throw std::out_of_range("an id or a position is outside of its table");
        }
      },
      "ids"_a, "places"_a, "tokens"_a, "words"_a.noconvert(), "positions"_a.noconvert(), "gamma"_a, "beta"_a,
      "epsilon"_a, "y"_a, "threads"_a);
  module.def(
      "mean",
      [](Address x, int sequences, int length, int columns, Address y, int threads) {
        kernels->mean(x, sequences, length, columns, y, threads);
      },
      "x"_a, "sequences"_a, "length"_a, "columns"_a, "y"_a, "threads"_a, nb::call_guard<nb::gil_scoped_release>());
  module.def(
      "attend",
      [](Address qkv, int start, int sequences, int length, int keys, int heads, int size, Address context,
         Address cosines, Address sines, int rotary_dim, Address bias, int longest, int window, int threads,
         bool causal, int kv_heads, int prefix, int prefix_start) {
        const Positions positions{cosines, sines, rotary_dim, bias, longest, window, causal, kv_heads};
        const SequenceGroup group{start, sequences, length, keys, prefix, prefix_start};
        kernels->attend(qkv, group, positions, heads, size, context, threads, {});
      },
      "qkv"_a, "start"_a, "sequences"_a, "length"_a, "keys"_a, "heads"_a, "size"_a, "context"_a, "cosines"_a, "sines"_a,
      "rotary_dim"_a, "bias"_a, "longest"_a, "window"_a, "threads"_a, "causal"_a = false, "kv_heads"_a = 0,
      "prefix"_a = 0, "prefix_start"_a = 0, nb::call_guard<nb::gil_scoped_release>());
  module.def(
      "attend_by_distance",
      [](Address qkv, int start, int sequences, int length, int keys, int heads, int size, Address context,
         Address table_of_keys, Address table_of_queries, int columns, Address row_of, int longest, int threads) {
        const DistanceRows distances{table_of_keys, table_of_queries, columns, row_of, longest};
        kernels->attend(qkv, {start, sequences, length, keys}, {}, heads, size, context, threads, distances);
      },
      "qkv"_a, "start"_a, "sequences"_a, "length"_a, "keys"_a, "heads"_a, "size"_a, "context"_a, "table_of_keys"_a,
      "table_of_queries"_a, "columns"_a, "row_of"_a, "longest"_a, "threads"_a,
      nb::call_guard<nb::gil_scoped_release>());
}
