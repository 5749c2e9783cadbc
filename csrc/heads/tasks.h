// The tasks of a forward pass, and the heads of a model in addition to pooling.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/types.h"

namespace embert {

// The tasks of a forward pass: bits of a mask, the same as in engine/tasks.py, where two more become these. A sequence
// may request several, and sequences with different tasks share a batch.

enum class Task : int {
  kEmbed = 0,   // a vector a sequence: pooled, through the Dense modules, cut, of length 1
  kTokens = 1,  // a vector a token: the last hidden state
  // Logits of the classification head or of the decider, a row a sequence; of multi-vectors without one, the score with
  // a query.
  kClassify = 2,
  kSparse = 3,     // weights of a sparse vector; token_heads.cu writes one row per token
  kMulti = 4,      // a vector a token: projected, of length 1; or a token's logits, where the model classifies tokens
  kLabelMass = 7,  // log Σ exp of a language model's logits of the whole vocabulary, one number per sequence
};
constexpr int kTaskCount = 8;

constexpr int kScoreVectors = 32;  // of a query, whose products with a document are one part of its score
constexpr int kMaxScoreColumns = 256;

using Tasks = uint8_t;  // bits of tasks
constexpr Tasks bit(Task task) {
  return Tasks(1u << int(task));
}

// Tasks that read one row of the last layer per sequence, or pool one: their results have one row per sequence.
constexpr Tasks kRowTasks = bit(Task::kEmbed) | bit(Task::kClassify) | bit(Task::kLabelMass);

// For messages: "EMBED, TOKENS".
inline std::string names_of(Tasks tasks) {
  const char* const names[kTaskCount] = {"EMBED", "TOKENS", "CLASSIFY", "SPARSE", "MULTI", "", "", "LABEL_MASS"};
  std::string all;
  for (int i = 0; i < kTaskCount; ++i) {
    if ((tasks >> i & 1) != 0) all += (all.empty() ? "" : ", ") + std::string(names[i]);
  }
  return all;
}

// A model's SPLADE configuration.
struct SpladeKind {
  Activation activation = Activation::kGeluErf;  // of the transform
  float epsilon = 1e-12f;                        // of its LayerNorm
  int logs = 1;      // 2: log1p(log1p(relu(x))), which sentence-transformers calls log1p_relu
  bool tied = true;  // the decoder is the word table
};

struct SpladeShape : SpladeKind {
  int hidden = 0, vocabulary = 0;
  DType dtype = DType::kFloat16;
};

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
  bool token_logits = false;           // MULTI's rows are logits, as they are, and not of length 1
  bool token_norm = false;             // a LayerNorm follows the first of two layers of `multi`
  bool label_mass = false;             // LABEL_MASS, by the row that EMBED pools, which is the last token's
  bool tied_vocabulary = true;         // its matrix is the word table
  // CLASSIFY by a decider (encoder_config.h) instead of `classifier`. 0: no decider. Otherwise the columns of a row:
  // logits of a text's tokens `marker`, in order, then zeros. Token types are then texts' types, this many.
  int options = 0, marker = 0, text_types = 0;

  int width(int hidden) const { return dense.empty() ? hidden : dense.back().out; }    // of EMBED's rows
  int labels() const { return classifier.empty() ? options : classifier.back().out; }  // of CLASSIFY's rows
  int multi_columns() const { return multi.empty() ? 0 : multi.back().out; }           // of MULTI's rows
  bool scores() const { return !multi.empty() && !token_logits && labels() == 0; }     // documents with queries
  Tasks tasks() const {
    if (options > 0) return bit(Task::kEmbed) | bit(Task::kClassify);
    return Tasks(bit(Task::kEmbed) | bit(Task::kTokens) | (classifier.empty() ? 0 : bit(Task::kClassify)) |
                 (token_weights || splade ? bit(Task::kSparse) : 0) | (multi.empty() ? 0 : bit(Task::kMulti)) |
                 (label_mass ? bit(Task::kLabelMass) : 0));
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
  // writes the result.
  int widest(int hidden) const {
    int widest = dense.empty() && classifier.empty() && !label_mass ? 0 : hidden;
    for (const DenseShape& layer : dense) widest = std::max(widest, dense_pitch(layer.out));
    for (const DenseShape& layer : classifier) widest = std::max(widest, dense_pitch(layer.in));
    return widest;
  }
};

}  // namespace embert
