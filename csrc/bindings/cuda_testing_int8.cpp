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

struct Int8Product : Provided<Linear> {};
struct Int8FeedForward : Provided<FeedForward> {};

}  // namespace

void bind_int8(nb::module_& m, nb::class_<Bench>& bench) {
  nb::class_<Int8Product>(m, "Int8Product")
      .def(
          "run",
          [](Int8Product& self, Bench& bench, Address x, Address sums, Address residual, Address residual_sums,
             int parts, int rows, Address y, Address y_stats) {
            bench.check(self.made->run({x, sums, parts}, {residual, residual_sums, parts}, rows, y, y_stats,
                                       self.splits, bench.stream()));
          },
          "bench"_a, "x"_a, "sums"_a, "residual"_a, "residual_sums"_a, "parts"_a, "rows"_a, "y"_a, "y_stats"_a = 0)
      .def_ro("splits", &Int8Product::splits);
  nb::class_<Int8FeedForward>(m, "Int8FeedForward")
      .def("run",
           [](Int8FeedForward& self, Bench& bench, Address x, Address sums, int parts, int rows, Address inner,
              Address y, Address y_stats) {
             Stream stream = bench.stream();
             bench.check(self.made->run({x, sums, parts}, rows, inner, y, y_stats, self.splits, stream));
           })
      .def_ro("splits", &Int8FeedForward::splits);
  bench
      .def("attention_in_blocks",
           [](Bench& bench, Address qkv, int rows, Address tiles, int tile_count, Address shorts, int short_count,
              int heads, Address context, Address maxima, Address relative, int reach) {
             const AttentionWork work{tiles, tile_count, shorts, short_count};
             bench.check(attention_in_blocks(qkv, rows, {work}, heads, {relative, reach}, {context, maxima},
                                             *bench.maps(DType::kFloat16), bench.stream()));
           })
      .def("quantize_blocks",
           [](Bench& bench, Address x, int rows, int columns, int block, Address data, Address scales) {
             bench.check(quantize_block_rows(DType::kFloat16, x, rows, columns, block, {data, scales}, bench.stream()));
           })
      .def(
          "int8_feed_forward",
          [](Bench& bench, std::array<Address, 3> in, std::array<Address, 3> out, int hidden, int inner, int activation,
             std::array<Address, 4> norms, float epsilon, Address data, Address row_scales, const std::string& provider,
             const std::string& library) {
            auto test = std::make_unique<Int8FeedForward>();
            test->provider = open_provider(bench, provider, library, DType::kFloat16);
            LinearWeights first{in[0], in[2], inner, hidden, Activation(activation)};
            LinearWeights second{out[0], out[2], hidden, inner};
            first.input_norm = {norms[0], norms[1]};
            second.residual_norm = {norms[2], norms[3]};
            first.scales = in[1], second.scales = out[1];
            first.epsilon = second.epsilon = epsilon;
            first.quantized = second.quantized = {data, row_scales};
            second.block = kInnerBlock;
            std::unique_ptr<Linear> first_linear, second_linear;
            bench.check(test->provider->prepare(first, bench.stream(), first_linear));
            bench.check(test->provider->prepare(second, bench.stream(), second_linear));
            bench.check(test->provider->fuse(std::move(first_linear), std::move(second_linear), test->made));
            bench.synchronize();
            return test;
          },
          "in_"_a, "out"_a, "hidden"_a, "inner"_a, "activation"_a, "norms"_a, "epsilon"_a, "data"_a, "row_scales"_a,
          "provider"_a = "hopper", "library"_a = "",
          "in_, out: weight, scales and bias; norms: gamma and beta of x, then of the residual, which is x too.")
      .def("quantize",
           [](Bench& bench, Address x, Address sums, int parts, Address gamma, Address beta, int rows, int columns,
              float epsilon, Address data, Address scales) {
             bench.check(quantize_rows(DType::kFloat16, {x, sums, parts}, {gamma, beta}, rows, columns, epsilon,
                                       {data, scales}, bench.stream()));
           })
      .def(
          "int8_product",
          [](Bench& bench, Address weight, Address scales, Address bias, int out, int in, int activation, Address gamma,
             Address beta, bool of_residual, float epsilon, Address data, Address row_scales,
             const std::string& provider, const std::string& library, int block) {
            auto test = std::make_unique<Int8Product>();
            test->provider = open_provider(bench, provider, library, DType::kFloat16);
            LinearWeights weights{weight, bias, out, in, Activation(activation)};
            Norm& norm = of_residual ? weights.residual_norm : weights.input_norm;
            norm = Norm{gamma, beta};
            weights.epsilon = epsilon;
            weights.scales = scales;
            weights.block = block;
            weights.quantized = {data, row_scales};
            bench.check(test->provider->prepare(weights, bench.stream(), test->made));
            bench.synchronize();
            return test;
          },
          "weight"_a, "scales"_a, "bias"_a, "out"_a, "in_"_a, "activation"_a, "gamma"_a, "beta"_a, "of_residual"_a,
          "epsilon"_a, "data"_a, "row_scales"_a, "provider"_a = "hopper", "library"_a = "", "block"_a = 0,
          "The Norm (gamma, beta) is of the residual or of x. data, row_scales: where x is quantized to, for rows in "
          "whole groups of 32.");
}

}  // namespace embert
