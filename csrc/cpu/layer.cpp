#include "cpu/layer.h"

#include <algorithm>
#include <memory>

#include "cpu/thread_pool.h"

namespace embert::cpu {

Layer::Layer(const Kernels& kernels, const LinearLayer& qkv, const LinearLayer& projection, const LinearLayer& inner,
             const LinearLayer& outer, Activation activation, const Norm& attention_norm, const Norm& norm, int heads)
    : kernels_(kernels),
      qkv_(qkv),
      projection_(projection),
      inner_(inner),
      outer_(outer),
      activation_(activation),
      attention_epsilon_(attention_norm.epsilon),
      epsilon_(norm.epsilon),
      heads_(heads) {
  for (const float* const vector : {attention_norm.gamma, attention_norm.beta, norm.gamma, norm.beta}) {
    norms_.insert(norms_.end(), vector, vector + outer.out());
  }
}

void Layer::operator()(const float* x, int rows, const std::vector<SequenceGroup>& groups, const Positions& positions,
                       float* y, int threads) const {
  const ThreadPool::Session session(threads);
  const int hidden = outer_.out();
  const std::size_t columns = std::max(qkv_.out(), inner_.out());
  // Freed after each call: of a text of 8 192 tokens it is 150 MB. Freed memory stays with the process (host.py).
  const auto memory = std::make_unique_for_overwrite<float[]>(rows * (columns + 2 * std::size_t(hidden)));
  float* const first = memory.get();  // of query, key and value, then of inner activations
  float* const context = first + rows * columns;
  float* const attended = context + std::size_t(rows) * hidden;
  const float* const norms = norms_.data();
  qkv_(x, rows, {}, first, threads);
  for (const SequenceGroup& group : groups) {
    kernels_.attend(first, group, positions, heads_, hidden / heads_, context, threads, {});
  }
  projection_(context, rows, {Activation::kNone, x, nullptr}, attended, threads);
  kernels_.normalize(attended, rows, hidden, norms, norms + hidden, attention_epsilon_, attended, threads);
  inner_(attended, rows, {activation_, nullptr, nullptr}, first, threads);
  outer_(first, rows, {Activation::kNone, attended, nullptr}, y, threads);
  kernels_.normalize(y, rows, hidden, norms + 2 * hidden, norms + 3 * hidden, epsilon_, y, threads);
}

}  // namespace embert::cpu
