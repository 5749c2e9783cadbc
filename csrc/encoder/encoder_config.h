// The configuration of a model: everything except its weights.
#pragma once

#include <vector>

#include "common/status.h"
#include "common/types.h"
#include "heads/heads.h"
#include "heads/tasks.h"
#include "ops/attention_work.h"

namespace embert {

// How one layer's attention encodes positions, and its window.
struct LayerAttention {
  int window = 0;      // a token attends to this many tokens on each side of itself; 0: all
  int rotary_dim = 0;  // the first columns of each head of queries and keys, which RoPE rotates; 0: none
  int table = 0;       // the index of its RoPE table
};

// BERT's layers, and how a model differs from them (engine/models/encoder_config.py is the same in Python).
//
// An embedding is the sum of a token's rows in the tables, then a LayerNorm, then a projection where the tables are
// narrower than the layers. A layer is attention and a feed-forward layer, each of which adds to its input rows.
// LayerNorms follow these sums. With pre_norm they come before attention and before the feed-forward layer, and one
// more follows the last layer.
struct EncoderConfig {
  int hidden = 0, layers = 0, heads = 0, inner = 0;
  int padded_head = 0;            // columns of a head, zero-padded from hidden / heads of them; 0: no padding
  int vocabulary = 0, types = 0;  // rows of the embedding tables; types 0: the model has none
  int positions = 0;              // tokens of the longest text
  bool position_table = true;     // positions have an embedding table
  bool padding = false;           // the position table has one more row, the last: the padding token's
  int embedding = 0;      // columns of the embedding tables where a projection follows; 0: hidden, without projection
  bool relative = false;  // attention adds scores by key − query: buckets of distances, or ALiBi
  std::vector<LayerAttention> attention;  // of each layer; empty: the default in all
  bool gated = false;                     // the feed-forward layer is out(activation(gate(x)) · inner(x))
  bool pre_norm = false;
  bool first_norm = true;   // with pre_norm: a LayerNorm comes before the first layer's attention
  std::vector<int> shared;  // of each layer, the index under which its weights are loaded; empty: its own
  float epsilon = 1e-12f;
  Activation activation = Activation::kGeluErf;
  Pooling pooling = Pooling::kMean;
  TaskHeads task_heads;
  DType dtype = DType::kFloat16;  // of weights and activations
  // The layers' matrices are int8, rotated, with a scale for each of their rows (ops/quantize.h).
  bool int8 = false;

  int head_size() const { return padded_head > 0 ? padded_head : hidden / heads; }
  int attention_columns() const { return heads * head_size(); }  // of queries, of keys, of values and of the context
  int max_length() const { return positions; }
  int position_rows() const { return positions + (padding ? 1 : 0); }
  int embedding_columns() const { return embedding > 0 ? embedding : hidden; }
  int width() const { return task_heads.width(hidden); }  // of EMBED's vectors
  LayerAttention attention_of(int layer) const { return attention.empty() ? LayerAttention() : attention[layer]; }
  bool has_attention_norm(int layer) const { return !pre_norm || first_norm || layer > 0; }
  int stored(int layer) const { return shared.empty() ? layer : shared[layer]; }
  int stored_layers() const;  // number of layers with weights
  // Columns of each RoPE table: half of its rotary dimension.
  std::vector<int> angle_tables() const;
  // On each side, the distances for which `relative` scores are stored: whole tiles of attention.
  int reach() const { return relative ? (positions + kAttentionRows - 1) / kAttentionRows * kAttentionRows : 0; }
  // Returns an error if the CUDA encoder does not support such a model.
  Status check() const;

 private:
  Status check_layers() const;
  Status check_int8() const;
  Status check_heads() const;
};

}  // namespace embert
