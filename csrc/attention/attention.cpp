// Which kernels compute attention: the choice depends on the device and the model, never on the batch's texts.

#include "attention/attention.h"

#include <string>

namespace embert {

bool attention_takes(DType, int head_size) {
  return head_size >= 8 && head_size <= 128 && head_size % 8 == 0;
}

Status attention(DType dtype, const void* qkv, int rows, const WindowedWork& work, int heads, int head_size,
                 const RelativeScores& relative, void* context, TensorMaps* maps, const Stream& stream) {
  if (!attention_takes(dtype, head_size)) {
    return Status::refused("attention: head size " + std::to_string(head_size) +
                           " is not a multiple of 8 from 8 to 128");
  }
  if (work.window > 0 && relative.scores != nullptr)
    return Status::refused("attention: a window and scores by relative position");
  EMBERT_TRY(check_attention_work(work.tile_count, work.short_count));
  // A batch of short texts alone takes the portable kernel: it computes the same bits, without a work list of tiles.
  const bool takes = attention_sm90_takes(dtype, head_size) && (work.window == 0 || attention_sm90_takes_windows());
  if (maps != nullptr && takes && work.tile_count > 0)
    return attention_sm90(dtype, qkv, rows, work, heads, head_size, relative, context, *maps, stream);
  if (dtype == DType::kFloat32) return attention_float32(qkv, work, heads, head_size, relative, context, stream);
  return attention_sm80(dtype, qkv, work, heads, head_size, relative, context, stream);
}

}  // namespace embert
