// The heads of a model besides pooling.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "heads/splade/shape.h"
#include "heads/tasks.h"

namespace embert {

// The shape of a head's linear layer.
enum class HeadActivation : int { kIdentity = 0, kTanh = 1, kRelu = 2, kSigmoid = 3, kGelu = 4, kGeluTanh = 5 };

// y[out] = activation(W[out, in] · x + bias)
struct DenseShape {
  int in = 0, out = 0;
  HeadActivation activation = HeadActivation::kIdentity;
};

// The stored length of a row of `columns` elements for dense.cu: whole packs, with zeros at the end.
constexpr int dense_pitch(int columns) {
  return (columns + 3) / 4 * 4;
}

struct TaskHeads {
  std::vector<DenseShape> dense;       // after pooling, before the cut
  std::vector<DenseShape> classifier;  // on the first token's row; empty: no CLASSIFY
  std::vector<DenseShape> multi;       // on every token's row, by the encoder's matrix products; empty: no MULTI
  bool token_weights = false;          // SPARSE: relu(w · h + b), one number per token
  std::optional<SpladeKind> splade;    // SPARSE: pairs of the vocabulary; never both

  int width(int hidden) const { return dense.empty() ? hidden : dense.back().out; }  // of EMBED's rows
  int labels() const { return classifier.empty() ? 0 : classifier.back().out; }      // of CLASSIFY's rows
  int multi_columns() const { return multi.empty() ? 0 : multi.back().out; }         // of MULTI's rows
  Tasks tasks() const {
    return Tasks(bit(Task::kEmbed) | bit(Task::kTokens) | (classifier.empty() ? 0 : bit(Task::kClassify)) |
                 (token_weights || splade ? bit(Task::kSparse) : 0) | (multi.empty() ? 0 : bit(Task::kMulti)));
  }
  // Tasks whose heads read sequences, not tokens.
  Tasks by_sequence() const { return kRowTasks | (splade ? bit(Task::kSparse) : 0); }
  // Memory of the multi-vector head, in columns for all rows, between its layers and after the last one: two rows of
  // the widest where there are several layers.
  int multi_scratch_columns() const {
    int widest = 0;
    for (const DenseShape& layer : multi) widest = std::max(widest, layer.out);
    return multi.size() > 1 ? 2 * widest : widest;
  }
  // The widest row before or after a linear layer, as stored; 0 without linear layers. The last layer of a classifier
  // writes the answer.
  int widest(int hidden) const {
    int widest = dense.empty() && classifier.empty() ? 0 : hidden;
    for (const DenseShape& layer : dense) widest = std::max(widest, dense_pitch(layer.out));
    for (const DenseShape& layer : classifier) widest = std::max(widest, dense_pitch(layer.in));
    return widest;
  }
};

}  // namespace embert
