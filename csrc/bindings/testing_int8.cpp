// Quantised rows and products of them, on device memory: for tests and benchmarks.

#include "bindings/testing_int8.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include "gemm/linear.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace embert {
namespace {

struct Int8Product {
  std::unique_ptr<GemmProvider> provider;
  std::unique_ptr<Linear> linear;
  int parts = 1;  // of the sums that the last run left
};

}  // namespace

void bind_int8(nb::module_& m, nb::class_<Bench>& bench) {
  nb::class_<Int8Product>(m, "Int8Product")
      .def(
          "run",
          [](Int8Product& self, Bench& bench, Address x, Address sums, Address residual, Address residual_sums,
             int parts, int rows, Address y, Address y_sums) {
            bench.check(self.linear->run({at(x), at<float2>(sums), parts},
                                         {at(residual), at<float2>(residual_sums), parts}, rows, at(y),
                                         at<float2>(y_sums), self.parts, bench.stream()));
          },
          "bench"_a, "x"_a, "sums"_a, "residual"_a, "residual_sums"_a, "parts"_a, "rows"_a, "y"_a, "y_sums"_a = 0)
      .def_ro("parts", &Int8Product::parts);
  bench
      .def("quantise",
           [](Bench& bench, Address x, Address sums, int parts, Address gamma, Address beta, int rows, int columns,
              float epsilon, Address data, Address scales) {
             bench.check(quantise_rows(DType::kFloat16, {at(x), at<float2>(sums), parts},
                                       {at<float>(gamma), at<float>(beta)}, rows, columns, epsilon,
                                       {at<int8_t>(data), at<float>(scales)}, bench.stream()));
           })
      .def(
          "int8_product",
          [](Bench& bench, Address weight, Address scales, Address bias, int out, int in, int activation,
             Address gamma, Address beta, bool of_residual, float epsilon, Address data, Address row_scales,
             const std::string& provider, const std::string& library) {
            auto made = std::make_unique<Int8Product>();
            bench.check(provider == "hopper" ? make_hopper(DType::kFloat16, made->provider)
                                             : make_cublaslt(DType::kFloat16, library, made->provider));
            LinearWeights of{at(weight), at<float>(bias), out, in, Activation(activation)};
            (of_residual ? of.residual_norm : of.input_norm) = {at<float>(gamma), at<float>(beta)};
            of.epsilon = epsilon;
            of.scales = at<float>(scales);
            of.quantised = {at<int8_t>(data), at<float>(row_scales)};
            bench.check(made->provider->prepare(of, bench.stream(), made->linear));
            bench.synchronize();
            return made;
          },
          "weight"_a, "scales"_a, "bias"_a, "out"_a, "in_"_a, "activation"_a, "gamma"_a, "beta"_a, "of_residual"_a,
          "epsilon"_a, "data"_a, "row_scales"_a, "provider"_a = "hopper", "library"_a = "",
          "The Norm (gamma, beta) is of the residual or of x. data, row_scales: where x is quantised to, for rows in "
          "whole groups of 32.");
}

}  // namespace embert
