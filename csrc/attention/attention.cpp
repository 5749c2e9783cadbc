// Selects the attention kernels: the choice depends on the device and the model, never on the batch's texts.

#include "attention/attention.h"

#include <cmath>

namespace embert {

namespace {

// True if the kernels for BERT's heads support these.
bool is_plain(const AttentionHeads& shape) {
  return shape.heads == shape.kv_heads && shape.head_size <= 128 && shape.scale == 0.0f && !shape.causal;
}

}  // namespace

bool attention_supports(const AttentionHeads& shape) {
  return shape.head_size >= 8 && shape.head_size <= kMaxHeadSize && shape.head_size % 8 == 0 && shape.kv_heads > 0 &&
         shape.heads % shape.kv_heads == 0;
}
double scale_of(const AttentionHeads& shape) {
  return shape.scale == 0.0f ? 1.0 / std::sqrt(double(shape.head_size)) : shape.scale;
}

Status attention(DType dtype, const void* qkv, int rows, const WindowedWork& work, const AttentionHeads& shape,
                 const RelativeScores& relative, void* context, TensorMaps* maps, const Stream& stream) {
  if (!attention_supports(shape) || (dtype == DType::kFloat32 && shape.head_size > kMaxFloat32Head)) {
    return Status::refused("attention: ", shape.heads, " heads of queries and ", shape.kv_heads, " of keys, of size ",
                           shape.head_size, ": sizes are multiples of 8 up to ",
                           dtype == DType::kFloat32 ? kMaxFloat32Head : kMaxHeadSize);
  }
  if (work.window > 0 && relative.scores != nullptr)
    return Status::refused("attention: a window and scores by relative position");
  if (work.prefixes != nullptr && (!shape.causal || shape.head_size > kMaxTileHead))
    return Status::refused("attention: prefixes with heads of ", shape.head_size, " columns, causal: ", shape.causal);
  EMBERT_TRY(check_attention_work(work.tile_count, work.short_count));
  const int heads = shape.heads, head_size = shape.head_size;
  const bool on_sm90 = maps != nullptr && work.tile_count > 0 && attention_sm90_supports(dtype, head_size, work.window);
  // A window masks nothing in short texts, unless it is narrower. The kernels for decoders compute the same bits as the
  // others.
  const bool masks = work.window > 0 && (work.tile_count > 0 || work.window < kAttentionShort - 1);
  if (!is_plain(shape) || (masks && !on_sm90)) {
    if (relative.scores != nullptr)
      return Status::refused("attention: scores by relative position with causal attention, shared keys or a scale");
    if (dtype == DType::kFloat32) return attention_fp32_decoder(qkv, work, shape, context, stream);
    if (shape.head_size > kMaxTileHead) return attention_sm80_wide(dtype, qkv, work, shape, context, stream);
    if (maps == nullptr || !attention_sm90_decoder_supports(dtype, shape))
      return attention_sm80_decoder(dtype, qkv, work, shape, context, stream);
    if (work.tile_count > 0) EMBERT_TRY(attention_sm90_decoder(dtype, qkv, rows, work, shape, context, *maps, stream));
    const AttentionWork shorts{nullptr, 0, work.shorts, work.short_count, work.queries};
    return attention_sm80_decoder(dtype, qkv, {shorts, work.window}, shape, context, stream);
  }
  // A batch with only short texts uses the portable kernel: it computes the same bits, without a work list of tiles.
  if (on_sm90) return attention_sm90(dtype, qkv, rows, work, heads, head_size, relative, context, *maps, stream);
  if (dtype == DType::kFloat32) return attention_fp32(qkv, work, heads, head_size, relative, context, stream);
  return attention_sm80(dtype, qkv, work, heads, head_size, relative, context, stream);
}

bool attention_writes_blocks(DType dtype, const WindowedWork& work, int head_size, const TensorMaps* maps) {
  return maps != nullptr && dtype == DType::kFloat16 && head_size == kHeadBlock && work.window == 0 &&
         work.tile_count > 0 && work.queries == Queries::kAll;
}

Status attention_in_blocks(const void* qkv, int rows, const WindowedWork& work, int heads,
                           const RelativeScores& relative, const QuantizedBlocks& context, TensorMaps& maps,
                           const Stream& stream) {
  EMBERT_TRY(check_attention_work(work.tile_count, work.short_count));
  if (!attention_writes_blocks(DType::kFloat16, work, kHeadBlock, &maps))
    return Status::refused("attention: this work does not leave its context in blocks");
  return attention_sm90_in_blocks(qkv, rows, work, heads, relative, context, maps, stream);
}

}  // namespace embert
