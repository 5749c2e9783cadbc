// context[T, heads·d] = softmax(scale·(Q·Kᵀ + relative))·V within each sequence of a packed batch; qkv is
// [T, (heads + 2·kv_heads)·d]: queries, keys, values.
#pragma once

#include <cstdint>

#include "common/launch.h"
#include "common/types.h"
#include "ops/attention_work.h"
#include "ops/quantize.h"

namespace embert {

class TensorMaps;

constexpr int kMaxHeadSize = 512, kMaxFloat32Head = 256;

// The heads of attention, and the keys that a query attends to in addition to its window.
struct AttentionHeads {
  int heads = 0;        // of queries
  int kv_heads = 0;     // of keys and of values; heads is a multiple of it
  int head_size = 0;    // a multiple of 8
  float scale = 0.0f;   // of scores; 0: 1/√head_size
  bool causal = false;  // a query attends to its own key and to those before it, of a window to those before it

  int columns() const { return heads * head_size; }         // of queries and of the context
  int key_columns() const { return kv_heads * head_size; }  // of keys and of values
  int qkv_columns() const { return columns() + 2 * key_columns(); }
};

// maps: on a Hopper device, else null. All forward passes of an encoder must use the same, because bits depend on it.
Status attention(DType dtype, const void* qkv, int rows, const WindowedWork& work, const AttentionHeads& heads,
                 const RelativeScores& relative, void* context, TensorMaps* maps, const Stream& stream);
// Disentangled attention (DeBERTa): scores also have scale · (q[i]·keys[r] + queries[r]·k[j]), r = row_of[i − j +
// longest − 1].
struct DisentangledScores {
  const void* keys = nullptr;       // [rows, heads · head_size], of the type of qkv; null: the part is absent
  const void* queries = nullptr;    // likewise
  const int16_t* row_of = nullptr;  // [2 · longest − 1], by query − key
  int longest = 0;                  // ≥ the longest sequence
};
constexpr int kMaxDistanceRows = 32767;    // of int16
constexpr int kMaxDisentangledHead = 128;  // columns

bool attention_supports(const AttentionHeads& heads);
// The factor of scores, in FP64.
double scale_of(const AttentionHeads& heads);

// The same in FP16 with an int8 context, where attention_writes_blocks: heads of kHeadBlock columns, each a block.
bool attention_writes_blocks(DType dtype, const WindowedWork& work, int head_size, const TensorMaps* maps);
Status attention_in_blocks(const void* qkv, int rows, const WindowedWork& work, int heads,
                           const RelativeScores& relative, const QuantizedBlocks& context, TensorMaps& maps,
                           const Stream& stream);

// The implementations that `attention` selects from. attention_supports is true for their arguments.
Status attention_fp32(const void* qkv, const AttentionWork& work, int heads, int head_size,
                      const RelativeScores& relative, void* context, const Stream& stream);
Status attention_sm80(DType dtype, const void* qkv, const AttentionWork& work, int heads, int head_size,
                      const RelativeScores& relative, void* context, const Stream& stream);  // 16-bit types
// Heads of up to 128 columns that share nothing.
Status attention_sm80_disentangled(DType dtype, const void* qkv, const AttentionWork& work, const AttentionHeads& heads,
                                   const DisentangledScores& positions, void* context,
                                   const Stream& stream);  // 16-bit types
// Heads that share keys and values, causal attention, windows, head sizes over 128, other scales; without relative
// scores. In FP32 heads have at most kMaxFloat32Head columns.
Status attention_fp32_decoder(const void* qkv, const WindowedWork& work, const AttentionHeads& heads, void* context,
                              const Stream& stream);
Status attention_sm80_decoder(DType dtype, const void* qkv, const WindowedWork& work, const AttentionHeads& heads,
                              void* context, const Stream& stream);  // 16-bit types
// The same for head sizes over kMaxTileHead, which the other kernels of 16-bit types do not take. A step has 32 keys,
// or 16 where the device has too little shared memory; bits depend on it.
constexpr int kMaxTileHead = 256;
Status attention_sm80_wide(DType dtype, const void* qkv, const WindowedWork& work, const AttentionHeads& heads,
                           void* context, const Stream& stream);
bool attention_sm90_supports(DType dtype, int head_size, int window);
Status attention_sm90(DType dtype, const void* qkv, int rows, const WindowedWork& work, int heads, int head_size,
                      const RelativeScores& relative, void* context, TensorMaps& maps, const Stream& stream);
Status attention_sm90_in_blocks(const void* qkv, int rows, const AttentionWork& work, int heads,
                                const RelativeScores& relative, const QuantizedBlocks& context, TensorMaps& maps,
                                const Stream& stream);
// Only tiles; texts of up to 32 tokens are skipped.
bool attention_sm90_decoder_supports(DType dtype, const AttentionHeads& heads);
Status attention_sm90_decoder(DType dtype, const void* qkv, int rows, const WindowedWork& work,
                              const AttentionHeads& heads, void* context, TensorMaps& maps, const Stream& stream);

}  // namespace embert
