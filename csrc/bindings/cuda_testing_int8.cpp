// Quantized rows and GEMMs of them, on device memory: for tests and benchmarks.

#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include "attention/attention.h"
#include "bindings/bench.h"
#include "gemm/gemm.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace embert {
namespace {

struct TestInt8Gemm {
  std::unique_ptr<GemmProvider> provider;
  std::unique_ptr<Linear> linear;
  int splits = 1;  // of the last run's row statistics
};

// Both GEMMs of a feed-forward layer.
struct Int8FeedForwardSm90 {
  std::unique_ptr<GemmProvider> provider;
  std::unique_ptr<FeedForward> both;
  int splits = 1;  // of the last run's row statistics
};

std::unique_ptr<GemmProvider> open_provider(Bench& bench, const std::string& name, const std::string& library) {
  std::unique_ptr<GemmProvider> provider;
  bench.check(name == "hopper" ? make_sm90(DType::kFloat16, provider)
                               : make_cublaslt(DType::kFloat16, library, provider));
  return provider;
}

}  // namespace

void bind_int8(nb::module_& m, nb::class_<Bench>& bench) {
  nb::class_<TestInt8Gemm>(m, "Int8Product")
      .def(
          "run",
          [](TestInt8Gemm& self, Bench& bench, Address x, Address sums, Address residual, Address residual_sums,
             int parts, int rows, Address y, Address y_stats) {
            bench.check(self.linear->run({pointer(x), pointer<float2>(sums), parts},
                                         {pointer(residual), pointer<float2>(residual_sums), parts}, rows, pointer(y),
                                         pointer<float2>(y_stats), self.splits, bench.stream()));
          },
          "bench"_a, "x"_a, "sums"_a, "residual"_a, "residual_sums"_a, "parts"_a, "rows"_a, "y"_a, "y_stats"_a = 0)
      .def_ro("splits", &TestInt8Gemm::splits);
  nb::class_<Int8FeedForwardSm90>(m, "Int8FeedForwardSm90")
      .def("run",
           [](Int8FeedForwardSm90& self, Bench& bench, Address x, Address sums, int parts, int rows, Address inner,
              Address y, Address y_stats) {
             Stream stream = bench.stream();
             bench.check(self.both->run({pointer(x), pointer<float2>(sums), parts}, rows, pointer(inner), pointer(y),
                                        pointer<float2>(y_stats), self.splits, stream));
           })
      .def_ro("splits", &Int8FeedForwardSm90::splits);
  bench
      .def("attention_in_blocks",
           [](Bench& bench, Address qkv, int rows, Address tiles, int tile_count, Address shorts, int short_count,
              int heads, Address context, Address maxima, Address relative, int reach) {
             const AttentionWork work{pointer<AttentionTile>(tiles), tile_count, pointer<AttentionTile>(shorts),
                                      short_count};
             bench.check(attention_in_blocks(pointer(qkv), rows, {work}, heads, {pointer<float>(relative), reach},
                                             {pointer<int8_t>(context), pointer(maxima)}, *bench.maps(DType::kFloat16),
                                             bench.stream()));
           })
      .def("quantize_blocks",
           [](Bench& bench, Address x, int rows, int columns, int block, Address data, Address scales) {
             bench.check(quantize_block_rows(DType::kFloat16, pointer(x), rows, columns, block,
                                             {pointer<int8_t>(data), pointer<float>(scales)}, bench.stream()));
           })
      .def(
          "int8_feed_forward",
          [](Bench& bench, std::array<Address, 3> in, std::array<Address, 3> out, int hidden, int inner, int activation,
             std::array<Address, 4> norms, float epsilon, Address data, Address row_scales, const std::string& provider,
             const std::string& library) {
            auto test = std::make_unique<Int8FeedForwardSm90>();
            test->provider = open_provider(bench, provider, library);
            LinearWeights first{pointer(in[0]), pointer<float>(in[2]), inner, hidden, Activation(activation)};
            LinearWeights second{pointer(out[0]), pointer<float>(out[2]), hidden, inner};
            first.input_norm = {pointer<float>(norms[0]), pointer<float>(norms[1])};
            second.residual_norm = {pointer<float>(norms[2]), pointer<float>(norms[3])};
            first.scales = pointer<float>(in[1]), second.scales = pointer<float>(out[1]);
            first.epsilon = second.epsilon = epsilon;
            first.quantized = second.quantized = {pointer<int8_t>(data), pointer<float>(row_scales)};
            second.block = kInnerBlock;
            std::unique_ptr<Linear> first_linear, second_linear;
            bench.check(test->provider->prepare(first, bench.stream(), first_linear));
            bench.check(test->provider->prepare(second, bench.stream(), second_linear));
            bench.check(test->provider->fuse(std::move(first_linear), std::move(second_linear), test->both));
            bench.synchronize();
            return test;
          },
          "in_"_a, "out"_a, "hidden"_a, "inner"_a, "activation"_a, "norms"_a, "epsilon"_a, "data"_a, "row_scales"_a,
          "provider"_a = "hopper", "library"_a = "",
          "in_, out: weight, scales and bias; norms: gamma and beta of x, then of the residual, which is x too.")
      .def("quantize",
           [](Bench& bench, Address x, Address sums, int parts, Address gamma, Address beta, int rows, int columns,
              float epsilon, Address data, Address scales) {
             bench.check(quantize_rows(DType::kFloat16, {pointer(x), pointer<float2>(sums), parts},
                                       {pointer<float>(gamma), pointer<float>(beta)}, rows, columns, epsilon,
                                       {pointer<int8_t>(data), pointer<float>(scales)}, bench.stream()));
           })
      .def(
          "int8_product",
          [](Bench& bench, Address weight, Address scales, Address bias, int out, int in, int activation, Address gamma,
             Address beta, bool of_residual, float epsilon, Address data, Address row_scales,
             const std::string& provider, const std::string& library, int block) {
            auto test = std::make_unique<TestInt8Gemm>();
            test->provider = open_provider(bench, provider, library);
            LinearWeights weights{pointer(weight), pointer<float>(bias), out, in, Activation(activation)};
            Norm& norm = of_residual ? weights.residual_norm : weights.input_norm;
            norm = Norm{pointer<float>(gamma), pointer<float>(beta)};
            weights.epsilon = epsilon;
            weights.scales = pointer<float>(scales);
            weights.block = block;
            weights.quantized = {pointer<int8_t>(data), pointer<float>(row_scales)};
            bench.check(test->provider->prepare(weights, bench.stream(), test->linear));
            bench.synchronize();
            return test;
          },
          "weight"_a, "scales"_a, "bias"_a, "out"_a, "in_"_a, "activation"_a, "gamma"_a, "beta"_a, "of_residual"_a,
          "epsilon"_a, "data"_a, "row_scales"_a, "provider"_a = "hopper", "library"_a = "", "block"_a = 0,
          "The Norm (gamma, beta) is of the residual or of x. data, row_scales: where x is quantized to, for rows in "
          "whole groups of 32.");
}

}  // namespace embert
