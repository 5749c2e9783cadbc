// embert.engine._cuda_testing: device memory as plain addresses, launchers of csrc as functions, and a timer that
// replays a graph of them. For tests/csrc and benchmarks only: it is built where EMBERT_TESTING is on, and no wheel has
// it.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>

#include "attention/attention.h"
#include "bench.h"
#include "gemm/gemm.h"
#include "heads/heads.h"
#include "ops/elementwise.h"
#include "ops/embedding.h"
#include "ops/norm.h"

namespace nb = nanobind;
using namespace nb::literals;

NB_MODULE(_cuda_testing, m) {
  using namespace embert;
  using Product = Provided<Linear>;
  using TestFeedForward = Provided<FeedForward>;
  using Maxima = Provided<TextMaxima>;
  m.doc() = "Single kernels on device memory, for tests and benchmarks.";
  bind_exceptions(m);
  nb::class_<Product>(m, "Product")
      .def(
          "run",
          [](Product& self, Bench& bench, Address x, Address residual, int rows, Address y, Address sums, int parts,
             Address y_stats) {
            const Address none, x_stats = residual ? none : sums, residual_stats = residual ? sums : none;
            bench.check(self.made->run({x, x_stats, parts}, {residual, residual_stats, parts}, rows, y, y_stats,
                                       self.splits, bench.stream()));
          },
          "bench"_a, "x"_a, "residual"_a, "rows"_a, "y"_a, "sums"_a = 0, "parts"_a = 1, "y_stats"_a = 0,
          "`sums` (with `parts` a group): of the residual's rows if there is one, else of x's.")
      .def_ro("splits", &Product::splits);

  nb::class_<TestFeedForward>(m, "BothProducts")
      .def(
          "run",
          [](TestFeedForward& self, Bench& bench, Address x, int rows, Address inner, Address y, Address sums,
             int parts, Address y_stats, bool backwards) {
            Stream stream = bench.stream();
            stream.backwards = !backwards;
            bench.check(self.made->run({x, sums, parts}, rows, inner, y, y_stats, self.splits, stream));
          },
          "bench"_a, "x"_a, "rows"_a, "inner"_a, "y"_a, "sums"_a = 0, "parts"_a = 1, "y_stats"_a = 0,
          "backwards"_a = false)
      .def_ro("splits", &TestFeedForward::splits);

  nb::class_<Maxima>(m, "Maxima")
      .def("run", [](Maxima& self, Bench& bench, Address x, Address text_of, int rows, Address maxima) {
        bench.check(self.made->run({x, text_of, rows, 0, rows, 0}, maxima, bench.stream()));
      });

  nb::class_<Bench>(m, "Bench")
      .def(nb::init<>())
      .def("allocate", &Bench::allocate)
      .def("free", &Bench::free)
      .def("upload", &Bench::upload)
      .def("download", &Bench::download)
      .def("fill", &Bench::fill)
      .def("copy", &Bench::copy)
      .def("synchronize", &Bench::synchronize)
      .def("begin_recording", &Bench::begin_recording)
      .def("end_recording", &Bench::end_recording)
      .def("replay", &Bench::replay)
      .def_prop_ro("recorded", &Bench::recorded, "Kernels and copies in the recorded graph.")
      .def_prop_ro(
          "stream", [](const Bench& bench) { return Address{reinterpret_cast<uintptr_t>(bench.stream().handle)}; },
          "The stream's address, for other libraries that launch on it.")
      .def(
          "product",
          [](Bench& bench, const std::string& provider, const std::string& library, int type, Address weight,
             Address bias, int out, int in, int activation, Address gamma, Address beta, bool of_residual,
             float epsilon, Address exact, bool prescaled_rows, Address next_gamma, bool gated, int head_size,
             int rotary_dim, int rope_columns, Address table, Address positions, bool rms, Address scales, int block,
             Address data, Address row_scales) {
            auto test = std::make_unique<Product>();
            test->provider = open_provider(bench, provider, library, DType(type));
            const Norm norm{gamma, beta};
            LinearWeights weights{weight, bias, out, in, Activation(activation), {}, {}, epsilon};
            (of_residual ? weights.residual_norm : weights.input_norm) = norm;
            weights.exact = exact;
            weights.prescaled_rows = prescaled_rows;
            weights.next_gamma = next_gamma;
            weights.gated = gated;
            weights.rms = rms;
            weights.scales = scales;
            weights.block = block;
            weights.quantized = {data, row_scales};
            const RopeColumns rope{head_size, rotary_dim, rope_columns, table, positions};
            if (table) weights.rope = &rope;
            bench.check(test->provider->prepare(weights, bench.stream(), test->made));
            bench.synchronize();
            return test;
          },
          "provider"_a, "library"_a, "dtype"_a, "weight"_a, "bias"_a, "out"_a, "in_"_a, "activation"_a, "gamma"_a = 0,
          "beta"_a = 0, "of_residual"_a = false, "epsilon"_a = 0.0f, "exact"_a = 0, "prescaled_rows"_a = false,
          "next_gamma"_a = 0, "gated"_a = false, "head_size"_a = 0, "rotary_dim"_a = 0, "rope_columns"_a = 0,
          "table"_a = 0, "positions"_a = 0, "rms"_a = false, "scales"_a = 0, "block"_a = 0, "data"_a = 0,
          "row_scales"_a = 0,
          "The Norm (gamma, beta) is of the residual or of x, whose weights are then rewritten in place from `exact`, "
          "the same in FP32, unless gamma is in the rows. `gated`: `out` is half of W's rows. With a table columns are "
          "rotated (RopeColumns). With scales W is int8, and x is quantized to data and row_scales, which hold whole "
          "groups of 32 rows.")
      .def(
          "feed_forward",
          [](Bench& bench, int type, Address in_weight, Address in_bias, Address out_weight, Address out_bias,
             int hidden, int inner, int activation, Address gamma, Address beta, float epsilon, Address exact,
             bool prescaled_rows, Address next_gamma) {
            auto test = std::make_unique<TestFeedForward>();
            test->provider = open_provider(bench, "hopper", "", DType(type));
            const Norm norm{gamma, beta};
            LinearWeights in{in_weight, in_bias, inner, hidden, Activation(activation), norm, {}, epsilon};
            LinearWeights out{out_weight, out_bias, hidden, inner, Activation::kNone, {}, norm, epsilon};
            in.exact = exact;
            in.prescaled_rows = out.prescaled_rows = prescaled_rows;
            out.next_gamma = next_gamma;
            std::unique_ptr<Linear> first, second;
            bench.check(test->provider->prepare(in, bench.stream(), first));
            bench.check(test->provider->prepare(out, bench.stream(), second));
            bench.check(test->provider->fuse(std::move(first), std::move(second), test->made));
            return test;
          },
          "dtype"_a, "in_weight"_a, "in_bias"_a, "out_weight"_a, "out_bias"_a, "hidden"_a, "inner"_a, "activation"_a,
          "gamma"_a = 0, "beta"_a = 0, "epsilon"_a = 0.0f, "exact"_a = 0, "prescaled_rows"_a = false,
          "next_gamma"_a = 0,
          "The Norm (gamma, beta) is of x; the rest as in `product`, of the first product's weights.")
      .def("maxima",
           [](Bench& bench, const std::string& provider, const std::string& library, int type, Address weight,
              Address bias, int out, int in) {
             auto test = std::make_unique<Maxima>();
             test->provider = open_provider(bench, provider, library, DType(type));
             const LinearWeights weights{weight, bias, out, in, Activation::kNone, {}, {}, 0.0f};
             bench.check(test->provider->prepare_maxima(weights, bench.stream(), test->made));
             if (test->made == nullptr)
               bench.check(make_portable_maxima(*test->provider, DType(type), weights, bench.stream(), test->made));
             bench.synchronize();
             return test;
           })
      .def("offsets",
           [](Bench& bench, Address header, Address lengths, Address ids, Address types, Address cuts, Address out_ids,
              Address out_types, Address positions, Address out_cuts, Address cu_seqlens, Address tiles, Address shorts,
              int tokens, int sequences, int tile_count, int short_count) {
             const OffsetsInput in{header, lengths, ids, types, cuts};
             const OffsetsOutput out{out_ids, out_types, positions, out_cuts, cu_seqlens, tiles, shorts};
             bench.check(compute_offsets(in, out, {tokens, sequences, tile_count, short_count}, bench.stream()));
           })
      .def("embed",
           [](Bench& bench, int type, Address word, Address position, Address kinds, Address gamma, Address beta,
              Address ids, Address types, Address positions, int rows, int hidden, float epsilon, Address y,
              Address sums, bool prescaled_rows) {
             bench.check(embed(DType(type), {word, position, kinds, {gamma, beta}, prescaled_rows}, ids, types,
                               positions, rows, hidden, epsilon, y, sums, bench.stream()));
           })
      .def("layernorm",
           [](Bench& bench, int type, Address x, Address gamma, Address beta, int rows, int hidden, float epsilon,
              Address y) {
             bench.check(layernorm(DType(type), x, {gamma, beta}, rows, hidden, epsilon, y, bench.stream()));
           })
      .def("rmsnorm",
           [](Bench& bench, int type, Address x, Address gamma, int rows, int hidden, float epsilon, Address y) {
             bench.check(rmsnorm(DType(type), x, gamma, rows, hidden, epsilon, y, bench.stream()));
           })
      .def("add_rmsnorm",
           [](Bench& bench, int type, Address x, Address gamma, int rows, int hidden, float epsilon, Address y,
              Address before, Address after, Address sums) {
             bench.check(
                 add_rmsnorm(DType(type), x, gamma, rows, hidden, epsilon, y, before, after, sums, bench.stream()));
           })
      .def("multiply_rmsnorm",
           [](Bench& bench, int type, Address x, Address gamma, int rows, int hidden, float epsilon, Address y) {
             bench.check(multiply_rmsnorm(DType(type), x, gamma, rows, hidden, epsilon, y, bench.stream()));
           })
      .def("qk_norm",
           [](Bench& bench, int type, Address x, int rows, int pitch, Address query, Address key, int heads,
              float epsilon, int head_size, int rotary_dim, int columns, Address table, Address positions, int values) {
             const RopeColumns rope{head_size, rotary_dim, columns, table, positions};
             bench.check(
                 qk_norm_rope(DType(type), x, rows, pitch, {query, key, heads, epsilon}, rope, values, bench.stream()));
           })
      .def("activate",
           [](Bench& bench, int type, int activation, int rows, int columns, Address x) {
             bench.check(activate_rows(DType(type), Activation(activation), rows, columns, x, bench.stream()));
           })
      .def(
          "attention",
          [](Bench& bench, int type, Address qkv, int rows, Address tiles, int tile_count, Address shorts,
             int short_count, int heads, int head_size, Address context, bool hopper, int queries, Address relative,
             int reach, int window, int kv_heads, float scale, bool causal, Address prefixes) {
            WindowedWork work({tiles, tile_count, shorts, short_count, Queries(queries)}, window);
            work.prefixes = prefixes;
            bench.check(attention(
                DType(type), qkv, rows, work, {heads, kv_heads == 0 ? heads : kv_heads, head_size, scale, causal},
                {relative, reach}, context, hopper ? bench.maps(DType(type)) : nullptr, bench.stream()));
          },
          "dtype"_a, "qkv"_a, "rows"_a, "tiles"_a, "tile_count"_a, "shorts"_a, "short_count"_a, "heads"_a,
          "head_size"_a, "context"_a, "hopper"_a = false, "queries"_a = 0, "relative"_a = 0, "reach"_a = 0,
          "window"_a = 0, "kv_heads"_a = 0, "scale"_a = 0.0f, "causal"_a = false, "prefixes"_a = 0)
      .def("gather",
           [](Bench& bench, int type, Address context, int context_columns, Address x, Address sums, int parts,
              Address cu_seqlens, int pooling, int sequences, int hidden, Address context_to, Address x_to,
              Address sums_to) {
             bench.check(gather(DType(type), context, context_columns, {x, sums, parts}, cu_seqlens, Pooling(pooling),
                                sequences, hidden, context_to, x_to, sums_to, bench.stream()));
           })
      .def(
          "pool",
          [](Bench& bench, int type, int pooling, Address hidden_states, Address cu_seqlens, Address cuts,
             int sequences, int hidden, Address vectors, Address sums, int parts, Address gamma, Address beta,
             float epsilon) {
            bench.check(pool(DType(type), Pooling(pooling), {hidden_states, sums, parts}, false, {gamma, beta}, epsilon,
                             cu_seqlens, cuts, nullptr, sequences, hidden, vectors, bench.stream()));
          },
          "dtype"_a, "pooling"_a, "hidden_states"_a, "cu_seqlens"_a, "cuts"_a, "sequences"_a, "hidden"_a, "vectors"_a,
          "sums"_a = 0, "parts"_a = 1, "gamma"_a = 0, "beta"_a = 0, "epsilon"_a = 0.0f);
}
