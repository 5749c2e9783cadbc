// What a model has on top of its last layer, besides pooling.
#pragma once

#include <algorithm>
#include <vector>

#include "heads/tasks.h"

namespace embert {

// Of a head's linear layer; its rows are few and in FP32, so all are computed exactly.
enum class HeadActivation : int { kIdentity = 0, kTanh = 1, kRelu = 2, kSigmoid = 3, kGelu = 4, kGeluTanh = 5 };

// y[out] = activation(W[out, in] · x + bias)
struct DenseShape {
  int in = 0, out = 0;
  HeadActivation activation = HeadActivation::kIdentity;
};

// The elements that a row of `columns` takes where dense.cu reads it: whole packs, with zeros at the end.
constexpr int dense_pitch(int columns) {
  return (columns + 3) / 4 * 4;
}

struct TaskHeads {
  std::vector<DenseShape> dense;       // after pooling, before the cut
  std::vector<DenseShape> classifier;  // on the first token's row; empty: no CLASSIFY
  int multi = 0;                       // columns of the multi-vector head; 0: no MULTI
  bool token_weights = false;          // SPARSE: relu(w · h + b), a number a token

  int width(int hidden) const { return dense.empty() ? hidden : dense.back().out; }  // of EMBED's rows
  int labels() const { return classifier.empty() ? 0 : classifier.back().out; }      // of CLASSIFY's rows
  Tasks tasks() const {
    return Tasks(bit(Task::kEmbed) | bit(Task::kTokens) | (classifier.empty() ? 0 : bit(Task::kClassify)) |
                 (token_weights ? bit(Task::kSparse) : 0) | (multi == 0 ? 0 : bit(Task::kMulti)));
  }
  // The widest row before or after a linear layer, as it lies in memory; 0 where there are none. What the last layer of
  // a classifier makes is the answer.
  int widest(int hidden) const {
    int widest = dense.empty() && classifier.empty() ? 0 : hidden;
    for (const DenseShape& layer : dense) widest = std::max(widest, dense_pitch(layer.out));
    for (const DenseShape& layer : classifier) widest = std::max(widest, dense_pitch(layer.in));
    return widest;
  }
};

}  // namespace embert
