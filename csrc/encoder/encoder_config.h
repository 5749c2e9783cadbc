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

// The window, the position encoding and the heads of one layer's attention; or the gated convolution in its place.
struct LayerAttention {
  int window = 0;      // a token attends to this many tokens on each side of itself; 0: all
  int rotary_dim = 0;  // the first columns of each head of queries and keys, which RoPE rotates; 0: none
  int table = 0;       // the index of its RoPE table
  int head_columns = 0, kv_heads = 0;  // where they differ from the model's; 0: they do not
  int taps = 0;                        // rows that each row of a convolution reads, itself included; 0: attention
  int after = 0;                       // of these, rows after it
};

// BERT's layers, and how a model differs from them (engine/models/encoder_config.py is the same in Python).
//
// An embedding is the sum of a token's rows in the tables, then a LayerNorm, then a projection where the tables are
// narrower than the layers. A layer is attention and a feed-forward layer, each of which adds to its input rows.
// LayerNorms follow these sums. With pre_norm they come before attention and before the feed-forward layer, and one
// more follows the last layer. Decoders are encoders too: a text is one forward pass, without a KV cache.
struct EncoderConfig {
#define EMBERT_FIELD(type, name, ...) type name = __VA_ARGS__;
#include "encoder/encoder_config_fields.inc"
#undef EMBERT_FIELD

  // Where no layer's heads differ.
  int head_size() const { return padded_head > 0 ? padded_head : head_columns > 0 ? head_columns : hidden / heads; }
  int key_heads() const { return kv_heads > 0 ? kv_heads : heads; }
  AttentionHeads attention_heads(int layer) const {
    const LayerAttention own = attention_of(layer);
    return {heads, own.kv_heads > 0 ? own.kv_heads : key_heads(), own.head_columns > 0 ? own.head_columns : head_size(),
            attention_scale, causal};
  }
  bool convolves(int layer) const { return attention_of(layer).taps > 0; }
  // Queries, keys and values of a layer, or b, c and x of its convolution; and the result, before the product after it.
  int qkv_columns(int layer) const { return convolves(layer) ? 3 * hidden : attention_heads(layer).qkv_columns(); }
  int context_columns(int layer) const { return convolves(layer) ? hidden : attention_heads(layer).columns(); }
  // Columns of a gathered row: the last layer's context, x, and room for row statistics (forward.cpp).
  int gathered_columns() const { return context_columns(layers - 1) + hidden + hidden / 2 + 64; }
  int max_length() const { return positions; }
  int position_rows() const { return positions + (padding ? 1 : 0); }
  int embedding_columns() const { return embedding > 0 ? embedding : hidden; }
  int width() const { return task_heads.width(hidden); }  // of EMBED's vectors
  LayerAttention attention_of(int layer) const {
    return size_t(layer) < attention.size() ? attention[layer] : LayerAttention();
  }
  bool has_attention_norm(int layer) const { return !pre_norm || first_norm || layer > 0; }
  bool has_experts(int layer) const {
    return std::find(expert_layers.begin(), expert_layers.end(), layer) != expert_layers.end();
  }
  int stored(int layer) const { return shared.empty() ? layer : shared[layer]; }
  int stored_layers() const;  // number of layers with weights
  // Columns of each RoPE table: half of its rotary dimension.
  std::vector<int> angle_tables() const;
  bool shares_prefixes() const;  // a sequence may continue another one (encoder/batch.h)
  // On each side, the distances for which `relative` scores are stored: whole tiles of attention.
  int reach() const { return relative ? (positions + kAttentionRows - 1) / kAttentionRows * kAttentionRows : 0; }
  // Returns an error if the CUDA encoder does not support such a model.
  Status check() const;

 private:
  Status check_attention() const;
  Status check_heads_of(int layer) const;
  Status check_layer_inputs() const;
  Status check_distances() const;
  Status check_norms() const;
  Status check_layers() const;
  Status check_int8() const;
  Status check_experts() const;
  Status check_heads() const;
};

}  // namespace embert
