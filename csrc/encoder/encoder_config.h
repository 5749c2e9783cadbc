// The configuration of a model: everything except its weights.
#pragma once

#include <vector>

#include "attention/attention.h"
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
// more follows the last layer. Decoders are encoders too: a text is one forward pass, without a KV cache.
struct EncoderConfig {
  int hidden = 0, layers = 0, heads = 0, inner = 0;
  int kv_heads = 0;               // heads of keys and of values, each shared by several of the queries; 0: `heads`
  int head_columns = 0;           // columns of a head; 0: hidden / heads
  int padded_head = 0;            // columns of a head, zero-padded from hidden / heads of them; 0: no padding
  int vocabulary = 0, types = 0;  // rows of the embedding tables; types 0: the model has none
  int positions = 0;              // tokens of the longest text
  bool position_table = true;     // positions have an embedding table
  bool padding = false;           // the position table has one more row, the last: the padding token's
  int embedding = 0;  // columns of the embedding tables where a projection follows; 0: hidden, without projection
  bool projects_first = false;  // the embeddings' norm follows the projection
  bool relative = false;        // attention adds scores by key − query: buckets of distances, or ALiBi
  // Disentangled attention: rows of the table that distances share, 0: none; and which parts the scores have
  // (DisentangledScores).
  int distance_rows = 0;
  bool distance_keys = false, distance_queries = false;
  std::vector<LayerAttention> attention;  // of each layer; empty: the default in all
  bool causal = false;                    // a token attends to itself and to tokens before it only
  bool qk_norm = false;                   // RMSNorms of each head's queries and keys, before they are rotated
  float attention_scale = 0.0f;           // of scores; 0: 1/sqrt(head_size)
  bool gated = false;                     // the feed-forward layer is out(activation(gate(x)) · inner(x))
  bool pre_norm = false;
  // All norms are RMSNorms: they do not subtract the mean, and have no beta (their betas are loaded as zeros).
  bool rms_norm = false;
  bool sublayer_norms = false;   // with pre_norm: a norm also follows each of a layer's parts, before it is added
  bool embedding_norm = true;    // a norm follows the sum of the embedding tables
  float embedding_scale = 1.0f;  // of rows of the word table, rounded to dtype; only without embedding_norm
  bool first_norm = true;        // with pre_norm: a LayerNorm comes before the first layer's attention
  std::vector<int> shared;       // of each layer, the index under which its weights are loaded; empty: its own
  float epsilon = 1e-12f;
  Activation activation = Activation::kGeluErf;
  Pooling pooling = Pooling::kMean;
  Pooling classifier_pooling = Pooling::kCls;  // the row that CLASSIFY reads: kCls or kLast
  TaskHeads task_heads;
  DType dtype = DType::kFloat16;  // of weights and activations
  // The layers' matrices are int8, rotated, with a scale for each of their rows (ops/quantize.h).
  bool int8 = false;

  int head_size() const { return padded_head > 0 ? padded_head : head_columns > 0 ? head_columns : hidden / heads; }
  int key_heads() const { return kv_heads > 0 ? kv_heads : heads; }
  int attention_columns() const { return heads * head_size(); }  // of queries and of the context
  int key_columns() const { return key_heads() * head_size(); }  // of keys and of values
  int qkv_columns() const { return attention_columns() + 2 * key_columns(); }
  // Of a gathered row: the context, x, and room for row statistics (forward.cpp).
  int gathered_columns() const { return attention_columns() + hidden + hidden / 2 + 64; }
  AttentionHeads attention_heads() const { return {heads, key_heads(), head_size(), attention_scale, causal}; }
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
  Status check_attention() const;
  Status check_distances() const;
  Status check_norms() const;
  Status check_layers() const;
  Status check_int8() const;
  Status check_heads() const;
};

}  // namespace embert
