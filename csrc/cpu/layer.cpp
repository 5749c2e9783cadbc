#include "cpu/layer.h"

#include <algorithm>
#include <utility>

#include "cpu/norm.h"

namespace embert::cpu {
namespace {

// Room that a thread keeps between calls.
float* room(std::size_t floats) {
  thread_local std::vector<float> kept;
  if (kept.size() < floats) kept.resize(floats);
  return kept.data();
}

}  // namespace

Layer::Layer(const LinearLayer& qkv, const LinearLayer& projection, const LinearLayer& inner, const LinearLayer& outer,
             Activation activation, Norm attention_norm, Norm norm, int heads)
    : qkv_(qkv),
      projection_(projection),
      inner_(inner),
      outer_(outer),
      activation_(activation),
      attention_norm_(std::move(attention_norm)),
      norm_(std::move(norm)),
      heads_(heads) {}

void Layer::operator()(const float* x, int rows, const std::vector<Group>& groups, const Positions& positions, float* y,
                       int threads) const {
  const int hidden = outer_.out();
  const std::size_t wide = std::max(qkv_.out(), inner_.out());
  float* const first = room(rows * (wide + 2 * std::size_t(hidden)));  // of qkv, then of inner activations
  float* const context = first + rows * wide;
  float* const attended = context + std::size_t(rows) * hidden;
  qkv_(x, rows, {}, first, threads);
  for (const Group& group : groups) attend(first, group, positions, heads_, hidden / heads_, context, threads);
  projection_(context, rows, {Activation::kNone, x, nullptr}, attended, threads);
  normalise(attended, rows, hidden, attention_norm_.gamma.data(), attention_norm_.beta.data(), attention_norm_.epsilon,
            attended, threads);
  inner_(attended, rows, {activation_, nullptr, nullptr}, first, threads);
  outer_(first, rows, {Activation::kNone, attended, nullptr}, y, threads);
  normalise(y, rows, hidden, norm_.gamma.data(), norm_.beta.data(), norm_.epsilon, y, threads);
}

}  // namespace embert::cpu
