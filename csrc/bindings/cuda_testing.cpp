// embert.engine._cuda_testing: device memory as plain addresses, every launcher as a function, and a timer that replays
// a graph of them. For tests/csrc and benchmarks only: it is built where EMBERT_TESTING is on, and no wheel has it.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "bindings/bench.h"
#include "gemm/gemm.h"
#include "heads/heads.h"
#include "ops/elementwise.h"
#include "ops/embedding.h"
#include "ops/norm.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace embert {
namespace {

// A GEMM with its provider.
struct Product {
  std::unique_ptr<GemmProvider> provider;
  std::unique_ptr<Linear> linear;
  int splits = 1;  // of the last run's row statistics
};

// Both GEMMs of a feed-forward layer.
struct TestFeedForward {
  std::unique_ptr<GemmProvider> provider;
  std::unique_ptr<FeedForward> fused;
  int splits = 1;  // of the last run's row statistics
};

}  // namespace
}  // namespace embert

NB_MODULE(_cuda_testing, m) {
  using namespace embert;
  m.doc() = "Single kernels on device memory, for tests and benchmarks.";
  bind_exceptions(m);
  nb::class_<Product>(m, "Product")
      .def(
          "run",
          [](Product& self, Bench& bench, Address x, Address residual, int rows, Address y, Address sums, int parts,
             Address y_stats) {
            const float2* const x_scales = residual == 0 ? pointer<float2>(sums) : nullptr;
            const float2* const of_residual = residual == 0 ? nullptr : pointer<float2>(sums);
            bench.check(self.linear->run({pointer(x), x_scales, parts}, {pointer(residual), of_residual, parts}, rows,
                                         pointer(y), pointer<float2>(y_stats), self.splits, bench.stream()));
          },
          "bench"_a, "x"_a, "residual"_a, "rows"_a, "y"_a, "sums"_a = 0, "parts"_a = 1, "y_stats"_a = 0,
          "`sums` (with `parts` a group): of the residual's rows if there is one, else of x's.")
      .def_ro("splits", &Product::splits)
      .def("check_folds", [](const Product& self) { raise(self.provider->check_folds()); });

  nb::class_<TestFeedForward>(m, "BothProducts")
      .def(
          "run",
          [](TestFeedForward& self, Bench& bench, Address x, int rows, Address inner, Address y, Address sums,
             int parts, Address y_stats, bool backwards) {
            Stream stream = bench.stream();
            stream.backwards = !backwards;
            bench.check(self.fused->run({pointer(x), pointer<float2>(sums), parts}, rows, pointer(inner), pointer(y),
                                        pointer<float2>(y_stats), self.splits, stream));
          },
          "bench"_a, "x"_a, "rows"_a, "inner"_a, "y"_a, "sums"_a = 0, "parts"_a = 1, "y_stats"_a = 0,
          "backwards"_a = false)
      .def_ro("splits", &TestFeedForward::splits);

  nb::class_<Bench> bench(m, "Bench");
  bench.def(nb::init<>())
      .def("dependent_launch", &Bench::dependent_launch)
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
          "stream", [](const Bench& bench) { return Address(bench.stream().handle); },
          "The stream's address, for other libraries that launch on it.")
      .def(
          "product",
          [](Bench& bench, const std::string& provider, const std::string& library, int type, Address weight,
             Address bias, int out, int in, int activation, Address gamma, Address beta, bool of_residual,
             float epsilon, Address exact, bool prescaled_rows, Address next_gamma, bool gated, int head_size,
             int rotary_dim, int rope_columns, Address table, Address positions, bool rms) {
            auto test = std::make_unique<Product>();
            bench.check(provider == "hopper" ? make_sm90(dtype(type), test->provider)
                                             : make_cublaslt(dtype(type), library, test->provider));
            const Norm norm{pointer<float>(gamma), pointer<float>(beta)};
            LinearWeights weights{pointer(weight), pointer<float>(bias), out, in, Activation(activation), {}, {},
                                  epsilon};
            (of_residual ? weights.residual_norm : weights.input_norm) = norm;
            weights.exact = pointer<float>(exact);
            weights.prescaled_rows = prescaled_rows;
            weights.next_gamma = pointer<float>(next_gamma);
            weights.gated = gated;
            weights.rms = rms;
            const RopeColumns rope{head_size, rotary_dim, rope_columns, pointer<float2>(table),
                                   pointer<int>(positions)};
            if (table != 0) weights.rope = &rope;
            bench.check(test->provider->prepare(weights, bench.stream(), test->linear));
            bench.synchronize();  // check_folds needs it completed
            return test;
          },
          "provider"_a, "library"_a, "dtype"_a, "weight"_a, "bias"_a, "out"_a, "in_"_a, "activation"_a, "gamma"_a = 0,
          "beta"_a = 0, "of_residual"_a = false, "epsilon"_a = 0.0f, "exact"_a = 0, "prescaled_rows"_a = false,
          "next_gamma"_a = 0, "gated"_a = false, "head_size"_a = 0, "rotary_dim"_a = 0, "rope_columns"_a = 0,
          "table"_a = 0, "positions"_a = 0, "rms"_a = false,
          "The Norm (gamma, beta) is of the residual or of x, whose weights are then rewritten in place from `exact`, "
          "the same in FP32, unless gamma is in the rows. `gated`: `out` is half of W's rows. With a table columns are "
          "rotated (RopeColumns).")
      .def(
          "feed_forward",
          [](Bench& bench, int type, Address in_weight, Address in_bias, Address out_weight, Address out_bias,
             int hidden, int inner, int activation, Address gamma, Address beta, float epsilon, Address exact,
             bool prescaled_rows, Address next_gamma) {
            auto test = std::make_unique<TestFeedForward>();
            bench.check(make_sm90(dtype(type), test->provider));
            const Norm norm{pointer<float>(gamma), pointer<float>(beta)};
            LinearWeights in{
                pointer(in_weight), pointer<float>(in_bias), inner, hidden, Activation(activation), norm, {}, epsilon};
            LinearWeights out{
                pointer(out_weight), pointer<float>(out_bias), hidden, inner, Activation::kNone, {}, norm, epsilon};
            in.exact = pointer<float>(exact);
            in.prescaled_rows = out.prescaled_rows = prescaled_rows;
            out.next_gamma = pointer<float>(next_gamma);
            std::unique_ptr<Linear> first, second;
            bench.check(test->provider->prepare(in, bench.stream(), first));
            bench.check(test->provider->prepare(out, bench.stream(), second));
            bench.check(test->provider->fuse(std::move(first), std::move(second), test->fused));
            return test;
          },
          "dtype"_a, "in_weight"_a, "in_bias"_a, "out_weight"_a, "out_bias"_a, "hidden"_a, "inner"_a, "activation"_a,
          "gamma"_a = 0, "beta"_a = 0, "epsilon"_a = 0.0f, "exact"_a = 0, "prescaled_rows"_a = false,
          "next_gamma"_a = 0,
          "The Norm (gamma, beta) is of x; the rest as in `product`, of the first product's weights.")
      .def("offsets",
           [](Bench& bench, Address header, Address lengths, Address ids, Address types, Address cuts, Address out_ids,
              Address out_types, Address positions, Address out_cuts, Address cu_seqlens, Address tiles, Address shorts,
              int tokens, int sequences, int tile_count, int short_count) {
             const OffsetsInput in{pointer<int>(header), pointer<int>(lengths), pointer<int>(ids), pointer<int>(types),
                                   pointer<uint32_t>(cuts)};
             const OffsetsOutput out{pointer<int>(out_ids),         pointer<int>(out_types),
                                     pointer<int>(positions),       pointer<uint32_t>(out_cuts),
                                     pointer<int>(cu_seqlens),      pointer<AttentionTile>(tiles),
                                     pointer<AttentionTile>(shorts)};
             bench.check(compute_offsets(in, out, {tokens, sequences, tile_count, short_count}, bench.stream()));
           })
      .def("embed_small",
           [](Bench& bench, int type, Address word, Address position, Address kinds, Address batch, size_t lengths,
              size_t ids, size_t types, size_t cuts, size_t bytes, Address out_cuts, Address cu_seqlens, Address tiles,
              Address shorts, int tokens, int sequences, int tile_count, int short_count, int hidden, Address y,
              Address sums, Address gamma) {
             const OffsetsInput in{pointer<int>(batch), pointer<int>(batch + lengths), pointer<int>(batch + ids),
                                   pointer<int>(batch + types), pointer<uint32_t>(batch + cuts)};
             const OffsetsOutput out{nullptr,
                                     nullptr,
                                     nullptr,
                                     pointer<uint32_t>(out_cuts),
                                     pointer<int>(cu_seqlens),
                                     pointer<AttentionTile>(tiles),
                                     pointer<AttentionTile>(shorts)};
             bench.check(embed_small(
                 dtype(type),
                 {pointer(word), pointer(position), pointer(kinds), {pointer<float>(gamma), nullptr}, gamma != 0}, in,
                 bytes, out, {tokens, sequences, tile_count, short_count}, hidden, pointer(y), pointer<float2>(sums),
                 bench.stream()));
           })
      .def("embed",
           [](Bench& bench, int type, Address word, Address position, Address kinds, Address gamma, Address beta,
              Address ids, Address types, Address positions, int rows, int hidden, float epsilon, Address y,
              Address sums, bool prescaled_rows) {
             bench.check(embed(dtype(type),
                               {pointer(word),
                                pointer(position),
                                pointer(kinds),
                                {pointer<float>(gamma), pointer<float>(beta)},
                                prescaled_rows},
                               pointer<int>(ids), pointer<int>(types), pointer<int>(positions), rows, hidden, epsilon,
                               pointer(y), pointer<float2>(sums), bench.stream()));
           })
      .def("layernorm",
           [](Bench& bench, int type, Address x, Address gamma, Address beta, int rows, int hidden, float epsilon,
              Address y) {
             bench.check(layernorm(dtype(type), pointer(x), {pointer<float>(gamma), pointer<float>(beta)}, rows, hidden,
                                   epsilon, pointer(y), bench.stream()));
           })
      .def("rmsnorm",
           [](Bench& bench, int type, Address x, Address gamma, int rows, int hidden, float epsilon, Address y) {
             bench.check(rmsnorm(dtype(type), pointer(x), pointer<float>(gamma), rows, hidden, epsilon, pointer(y),
                                 bench.stream()));
           })
      .def("add_rmsnorm",
           [](Bench& bench, int type, Address x, Address gamma, int rows, int hidden, float epsilon, Address y,
              Address sums) {
             bench.check(add_rmsnorm(dtype(type), pointer(x), pointer<float>(gamma), rows, hidden, epsilon, pointer(y),
                                     pointer<float2>(sums), bench.stream()));
           })
      .def("embed_words",
           [](Bench& bench, int type, Address word, Address ids, int rows, int hidden, float scale, Address y,
              Address sums) {
             bench.check(embed_words(dtype(type), pointer(word), pointer<int>(ids), rows, hidden, scale, pointer(y),
                                     pointer<float2>(sums), bench.stream()));
           })
      .def("qk_norm",
           [](Bench& bench, int type, Address x, int rows, int pitch, Address query, Address key, int heads,
              float epsilon, int head_size, int rotary_dim, int columns, Address table, Address positions) {
             const RopeColumns rope{head_size, rotary_dim, columns, pointer<float2>(table), pointer<int>(positions)};
             bench.check(qk_norm_rope(dtype(type), pointer(x), rows, pitch,
                                      {pointer<float>(query), pointer<float>(key), heads, epsilon}, rope,
                                      bench.stream()));
           })
      .def("activate",
           [](Bench& bench, int type, int activation, int rows, int columns, Address x) {
             bench.check(activate_rows(dtype(type), Activation(activation), rows, columns, pointer(x), bench.stream()));
           })
      .def("gate",
           [](Bench& bench, int type, int activation, Address x, int rows, int columns, Address y) {
             bench.check(
                 gate_rows(dtype(type), Activation(activation), pointer(x), rows, columns, pointer(y), bench.stream()));
           })
      .def("rope",
           [](Bench& bench, int type, Address x, int rows, int pitch, int head_size, int rotary_dim, int columns,
              Address table, Address positions) {
             const RopeColumns rope{head_size, rotary_dim, columns, pointer<float2>(table), pointer<int>(positions)};
             bench.check(rope_rows(dtype(type), pointer(x), rows, pitch, rope, bench.stream()));
           })
      .def(
          "attention",
          [](Bench& bench, int type, Address qkv, int rows, Address tiles, int tile_count, Address shorts,
             int short_count, int heads, int head_size, Address context, bool hopper, int queries, Address relative,
             int reach, int window, int longest, int kv_heads, float scale, bool causal) {
            const AttentionWork work{pointer<AttentionTile>(tiles), tile_count, pointer<AttentionTile>(shorts),
                                     short_count, Queries(queries)};
            bench.check(attention(dtype(type), pointer(qkv), rows, {work, window, longest},
                                  {heads, kv_heads == 0 ? heads : kv_heads, head_size, scale, causal},
                                  {pointer<float>(relative), reach}, pointer(context),
                                  hopper ? bench.maps(dtype(type)) : nullptr, bench.stream()));
          },
          "dtype"_a, "qkv"_a, "rows"_a, "tiles"_a, "tile_count"_a, "shorts"_a, "short_count"_a, "heads"_a,
          "head_size"_a, "context"_a, "hopper"_a = false, "queries"_a = 0, "relative"_a = 0, "reach"_a = 0,
          "window"_a = 0, "longest"_a = 0, "kv_heads"_a = 0, "scale"_a = 0.0f, "causal"_a = false)
      .def("disentangled_attention",
           [](Bench& bench, int type, Address qkv, Address tiles, int tile_count, Address shorts, int short_count,
              int heads, int head_size, float scale, Address keys, Address queries, Address row_of, int longest,
              Address context) {
             const AttentionWork work{pointer<AttentionTile>(tiles), tile_count, pointer<AttentionTile>(shorts),
                                      short_count};
             bench.check(
                 attention_sm80_disentangled(dtype(type), pointer(qkv), work, {heads, heads, head_size, scale},
                                             {pointer(keys), pointer(queries), pointer<int16_t>(row_of), longest},
                                             pointer(context), bench.stream()));
           })
      .def("gather",
           [](Bench& bench, int type, Address context, int context_columns, Address x, Address sums, int parts,
              Address cu_seqlens, int pooling, int sequences, int hidden, Address context_to, Address x_to,
              Address sums_to) {
             bench.check(gather(dtype(type), pointer(context), context_columns,
                                {pointer(x), pointer<float2>(sums), parts}, pointer<int>(cu_seqlens), Pooling(pooling),
                                sequences, hidden, pointer(context_to), pointer(x_to), pointer<float2>(sums_to),
                                bench.stream()));
           })
      .def(
          "pool",
          [](Bench& bench, int type, int pooling, Address hidden_states, Address cu_seqlens, Address cuts,
             int sequences, int hidden, Address vectors, Address sums, int parts, Address gamma, Address beta,
             float epsilon, bool gathered, int longest, Address chosen) {
            bench.check(pool(dtype(type), Pooling(pooling), {pointer(hidden_states), pointer<float2>(sums), parts},
                             gathered, {pointer<float>(gamma), pointer<float>(beta)}, epsilon, pointer<int>(cu_seqlens),
                             pointer<uint32_t>(cuts), pointer<int>(chosen), sequences, longest, hidden,
                             pointer<float>(vectors), bench.stream()));
          },
          "dtype"_a, "pooling"_a, "hidden_states"_a, "cu_seqlens"_a, "cuts"_a, "sequences"_a, "hidden"_a, "vectors"_a,
          "sums"_a = 0, "parts"_a = 1, "gamma"_a = 0, "beta"_a = 0, "epsilon"_a = 0.0f, "gathered"_a = false,
          "longest"_a = 0, "chosen"_a = 0)
      .def("dense",
           [](Bench& bench, Address x, int rows, Address weight, Address bias, int in, int out, int activation,
              Address y, int y_pitch) {
             const DenseLayer layer{
                 {in, out, HeadActivation(activation)}, pointer<float>(weight), pointer<float>(bias)};
             bench.check(dense(pointer<float>(x), rows, layer, pointer<float>(y), y_pitch, bench.stream()));
           })
      .def("cut_rows",
           [](Bench& bench, Address x, Address cuts, Address chosen, int rows, int width, Address y) {
             bench.check(cut_rows(pointer<float>(x), pointer<uint32_t>(cuts), pointer<int>(chosen), rows, width,
                                  pointer<float>(y), bench.stream()));
           })
      .def("token_rows",
           [](Bench& bench, int type, Address x, Address chosen, int rows, int columns, bool unit_length, Address y) {
             bench.check(token_rows(dtype(type), pointer(x), pointer<int>(chosen), rows, columns, unit_length,
                                    pointer<float>(y), bench.stream()));
           })
      .def("token_weights",
           [](Bench& bench, int type, Address x, Address sums, int parts, Address gamma, Address beta, float epsilon,
              Address chosen, int rows, int hidden, Address weight, Address bias, Address y) {
             bench.check(token_weights(dtype(type), {pointer(x), pointer<float2>(sums), parts},
                                       {pointer<float>(gamma), pointer<float>(beta)}, epsilon, pointer<int>(chosen),
                                       rows, hidden, pointer<float>(weight), pointer<float>(bias), pointer<float>(y),
                                       bench.stream()));
           })
      .def("convert", [](Bench& bench, int from, Address x, int to, Address y, size_t count) {
        bench.check(convert(dtype(from), pointer(x), dtype(to), pointer(y), count, bench.stream()));
      });
  bind_splade(m, bench);
  bind_int8(m, bench);
}
