#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>

#include "bindings/bench.h"
#include "gemm/gemm.h"
#include "heads/splade.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace embert {
namespace {

using Integers = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

using Maxima = Provided<TextMaxima>;

std::unique_ptr<Maxima> make_maxima(Bench& bench, const std::string& provider, const std::string& library, int type,
                                    Address weight, Address bias, int out, int in) {
  auto test = std::make_unique<Maxima>();
  test->provider = open_provider(bench, provider, library, DType(type));
  const LinearWeights weights{weight, bias, out, in, Activation::kNone, {}, {}, 0.0f};
  bench.check(test->provider->prepare_maxima(weights, bench.stream(), test->made));
  if (test->made == nullptr)
    bench.check(make_portable_maxima(*test->provider, DType(type), weights, bench.stream(), test->made));
  bench.synchronize();
  return test;
}

// The head with its provider, and one result.
struct Splade {
  std::unique_ptr<GemmProvider> provider;
  std::unique_ptr<SpladeHead> head;
  SpladePairs result;
};

std::unique_ptr<Splade> make_splade(Bench& bench, const std::string& provider, const std::string& library, int type,
                                    int hidden, int vocabulary, int activation, float epsilon, int logs,
                                    Address transform, Address transform_bias, Address gamma, Address beta,
                                    Address decoder_bias, Address decoder, int rows, int texts, int64_t pairs) {
  auto test = std::make_unique<Splade>();
  test->provider = open_provider(bench, provider, library, DType(type));
  SpladeShape shape;
  shape.hidden = hidden;
  shape.vocabulary = vocabulary;
  shape.activation = Activation(activation);
  shape.epsilon = epsilon;
  shape.logs = logs;
  shape.dtype = DType(type);
  test->head = std::make_unique<SpladeHead>(shape);
  const SpladeWeights weights{transform, decoder, transform_bias, gamma, beta, decoder_bias};
  bench.check(test->head->prepare(*test->provider, weights, rows, texts, bench.stream()));
  bench.check(test->result.allocate(vocabulary, texts, pairs));
  return test;
}

template <typename T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> copied(const T* from, size_t count) {
  T* const data = new T[std::max<size_t>(count, 1)];
  std::copy(from, from + count, data);
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return {data, {count}, owner};
}

}  // namespace

void bind_splade(nb::module_& module, nb::class_<Bench>& bench) {
  nb::class_<Maxima>(module, "Maxima")
      .def(
          "run",
          [](Maxima& self, Bench& bench, Address x, Address text_of, int all_rows, int first_row, int rows,
             int first_text, Address maxima) {
            const TextRows rows_of_texts{x, text_of, all_rows, first_row, rows, first_text};
            bench.check(self.made->run(rows_of_texts, maxima, bench.stream()));
          },
          "bench"_a, "x"_a, "text_of"_a, "all_rows"_a, "first_row"_a, "rows"_a, "first_text"_a, "maxima"_a)
      .def_prop_ro("workspace_bytes", [](const Maxima& self) { return self.made->workspace_bytes(); });

  nb::class_<Splade>(module, "Splade")
      .def(
          "run",
          [](Splade& self, Bench& bench, Address x, Address scratch, int rows, int texts, Address cu_seqlens,
             Address chosen, std::optional<Integers> host_cu_seqlens, std::optional<Integers> host_chosen) {
            const SpladeBatch batch{x,
                                    scratch,
                                    rows,
                                    texts,
                                    cu_seqlens,
                                    chosen,
                                    host_cu_seqlens ? host_cu_seqlens->data() : nullptr,
                                    host_chosen ? host_chosen->data() : nullptr};
            bench.check(self.head->run(batch, self.result, bench.stream()));
          },
          "bench"_a, "x"_a, "scratch"_a, "rows"_a, "texts"_a, "cu_seqlens"_a, "chosen"_a = 0,
          "host_cu_seqlens"_a = nb::none(), "host_chosen"_a = nb::none())
      .def(
          "answer",
          [](const Splade& self, int texts) {
            const int complete = self.result.complete(texts);
            size_t pairs = 0;
            for (int i = 0; i < complete; ++i) pairs += self.result.counts()[i];
            return std::make_tuple(complete, copied(self.result.counts(), texts), copied(self.result.indices(), pairs),
                                   copied(self.result.values(), pairs));
          },
          "texts"_a,
          "How many of the first texts are complete; pairs of each text; indices and values of the complete ones.")
      .def_prop_ro("texts_at_once", [](const Splade& self) { return self.head->texts_at_once(); })
      .def_prop_ro("workspace_bytes", [](const Splade& self) { return self.head->workspace_bytes(); });

  bench.def("maxima", &make_maxima, "provider"_a, "library"_a, "dtype"_a, "weight"_a, "bias"_a, "out"_a, "in_"_a)
      .def("splade", &make_splade, "provider"_a, "library"_a, "dtype"_a, "hidden"_a, "vocabulary"_a, "activation"_a,
           "epsilon"_a, "logs"_a, "transform"_a, "transform_bias"_a, "gamma"_a, "beta"_a, "decoder_bias"_a, "decoder"_a,
           "rows"_a, "texts"_a, "pairs"_a)
      .def("begin_maxima",
           [](Bench& bench, Address cu_seqlens, Address chosen, int first, int count, int end_row, int pitch,
              Address text_of, Address maxima, Address totals) {
             bench.check(begin_maxima({cu_seqlens, chosen, first, count, end_row}, pitch, text_of, maxima, totals,
                                      bench.stream()));
           })
      .def("count_pairs",
           [](Bench& bench, Address maxima, int columns, int pitch, int count, Address totals, Address pieces) {
             bench.check(count_pairs(maxima, columns, pitch, count, totals, pieces, bench.stream()));
           })
      .def("write_pairs", [](Bench& bench, Address maxima, int columns, int pitch, int first, int count, Address totals,
                             Address pieces, Address before, Address after, Address counts, Address indices,
                             Address values, int64_t capacity, int logs) {
        const PairBuffers to{counts, indices, values, capacity, logs};
        bench.check(
            write_pairs(maxima, columns, pitch, first, count, totals, pieces, before, after, to, bench.stream()));
      });
  module.attr("PIECE_COLUMNS") = kPieceColumns;
  module.attr("MAXIMA_COLUMNS") = kMaximaColumns;
}

}  // namespace embert
