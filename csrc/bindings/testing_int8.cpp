// Quantized rows and GEMMs of them, on device memory: for tests and benchmarks.

#include "bindings/testing_int8.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include "attention/attention.h"
#include "gemm/gemm.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace embert {
namespace {

struct Int8Product {
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
  std::unique_ptr<GemmProvider> made;
  bench.check(name == "hopper" ? make_hopper(DType::kFloat16, made) : make_cublaslt(DType::kFloat16, library, made));
  return made;
}

}  // namespace

void bind_int8(nb::module_& m, nb::class_<Bench>& bench) {
  nb::class_<Int8Product>(m, "Int8Product")
      .def(
          "run",
          [](Int8Product& self, Bench& bench, Address x, Address sums, Address residual, Address residual_sums,
             int parts, int rows, Address y, Address y_stats) {
            bench.check(self.linear->run({at(x), at<float2>(sums), parts},
                                         {at(residual), at<float2>(residual_sums), parts}, rows, at(y),
                                         at<float2>(y_stats), self.splits, bench.stream()));
          },
          "bench"_a, "x"_a, "sums"_a, "residual"_a, "residual_sums"_a, "parts"_a, "rows"_a, "y"_a, "y_stats"_a = 0)
      .def_ro("splits", &Int8Product::splits);
  nb::class_<Int8FeedForwardSm90>(m, "Int8FeedForwardSm90")
      .def("run",
           [](Int8FeedForwardSm90& self, Bench& bench, Address x, Address sums, int parts, int rows, Address inner,
              Address y, Address y_stats) {
             Stream along = bench.stream();
             bench.check(self.both->run({at(x), at<float2>(sums), parts}, rows, at(inner), at(y), at<float2>(y_stats),
                                        self.splits, along));
           })
      .def_ro("splits", &Int8FeedForwardSm90::splits);
  bench
      .def("attention_in_blocks",
           [](Bench& bench, Address qkv, int rows, Address tiles, int tile_count, Address shorts, int short_count,
              int heads, Address context, Address maxima, Address relative, int reach) {
             const AttentionWork work{at<AttentionTile>(tiles), tile_count, at<AttentionTile>(shorts), short_count};
             bench.check(attention_in_blocks(at(qkv), rows, {work}, heads, {at<float>(relative), reach},
                                             {at<int8_t>(context), at(maxima)}, *bench.maps(DType::kFloat16),
                                             bench.stream()));
           })
      .def("quantize_blocks",
           [](Bench& bench, Address x, int rows, int columns, int block, Address data, Address scales) {
             bench.check(quantize_block_rows(DType::kFloat16, at(x), rows, columns, block,
                                             {at<int8_t>(data), at<float>(scales)}, bench.stream()));
           })
      .def(
          "int8_feed_forward",
          [](Bench& bench, std::array<Address, 3> in, std::array<Address, 3> out, int hidden, int inner, int activation,
             std::array<Address, 4> norms, float epsilon, Address data, Address row_scales, const std::string& provider,
             const std::string& library) {
            auto made = std::make_unique<Int8FeedForwardSm90>();
            made->provider = open_provider(bench, provider, library);
            LinearWeights first{at(in[0]), at<float>(in[2]), inner, hidden, Activation(activation)};
            LinearWeights second{at(out[0]), at<float>(out[2]), hidden, inner};
            first.input_norm = {at<float>(norms[0]), at<float>(norms[1])};
            second.residual_norm = {at<float>(norms[2]), at<float>(norms[3])};
            first.scales = at<float>(in[1]), second.scales = at<float>(out[1]);
            first.epsilon = second.epsilon = epsilon;
            first.quantized = second.quantized = {at<int8_t>(data), at<float>(row_scales)};
            second.block = kInnerBlock;
            std::unique_ptr<Linear> one, other;
            bench.check(made->provider->prepare(first, bench.stream(), one));
            bench.check(made->provider->prepare(second, bench.stream(), other));
            bench.check(made->provider->join(std::move(one), std::move(other), made->both));
            bench.synchronize();
            return made;
          },
          "in_"_a, "out"_a, "hidden"_a, "inner"_a, "activation"_a, "norms"_a, "epsilon"_a, "data"_a, "row_scales"_a,
          "provider"_a = "hopper", "library"_a = "",
          "in_, out: weight, scales and bias; norms: gamma and beta of x, then of the residual, which is x too.")
      .def("quantize",
           [](Bench& bench, Address x, Address sums, int parts, Address gamma, Address beta, int rows, int columns,
              float epsilon, Address data, Address scales) {
             bench.check(quantize_rows(DType::kFloat16, {at(x), at<float2>(sums), parts},
                                       {at<float>(gamma), at<float>(beta)}, rows, columns, epsilon,
                                       {at<int8_t>(data), at<float>(scales)}, bench.stream()));
           })
      .def(
          "int8_product",
          [](Bench& bench, Address weight, Address scales, Address bias, int out, int in, int activation, Address gamma,
             Address beta, bool of_residual, float epsilon, Address data, Address row_scales,
             const std::string& provider, const std::string& library, int block) {
            auto made = std::make_unique<Int8Product>();
            made->provider = open_provider(bench, provider, library);
            LinearWeights of{at(weight), at<float>(bias), out, in, Activation(activation)};
            Norm& norm = of_residual ? of.residual_norm : of.input_norm;
            norm = Norm{at<float>(gamma), at<float>(beta)};
            of.epsilon = epsilon;
            of.scales = at<float>(scales);
            of.block = block;
            of.quantized = {at<int8_t>(data), at<float>(row_scales)};
            bench.check(made->provider->prepare(of, bench.stream(), made->linear));
            bench.synchronize();
            return made;
          },
          "weight"_a, "scales"_a, "bias"_a, "out"_a, "in_"_a, "activation"_a, "gamma"_a, "beta"_a, "of_residual"_a,
          "epsilon"_a, "data"_a, "row_scales"_a, "provider"_a = "hopper", "library"_a = "", "block"_a = 0,
          "The Norm (gamma, beta) is of the residual or of x. data, row_scales: where x is quantized to, for rows in "
          "whole groups of 32.");
}

}  // namespace embert
