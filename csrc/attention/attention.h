// context[T, heads·d] = softmax((Q·Kᵀ + relative)/√d)·V within each sequence of a packed batch; qkv is [T, 3·heads·d].
#pragma once

#include "attention/work.h"
#include "device/dtype.h"
#include "device/launch.h"

namespace embert {

class TensorMaps;

// maps: on a Hopper device, else null. All forwards of an encoder have to agree on it, because bits depend on it.
Status attention(DType dtype, const void* qkv, int rows, const WindowedWork& work, int heads, int head_size,
                 const RelativeScores& relative, void* context, TensorMaps* maps, const Stream& stream);
bool attention_takes(DType dtype, int head_size);

// What `attention` chooses from. attention_takes is true for what they get.
Status attention_float32(const void* qkv, const WindowedWork& work, int heads, int head_size,
                         const RelativeScores& relative, void* context, const Stream& stream);
Status attention_sm80(DType dtype, const void* qkv, const WindowedWork& work, int heads, int head_size,
                      const RelativeScores& relative, void* context, const Stream& stream);  // 16-bit types
bool attention_sm90_takes(DType dtype, int head_size, int window);
Status attention_sm90(DType dtype, const void* qkv, int rows, const WindowedWork& work, int heads, int head_size,
                      const RelativeScores& relative, void* context, TensorMaps& maps, const Stream& stream);
// The same bits where no text has a window or relative scores. Tiles alone; texts of up to 32 tokens are not touched.
bool attention_sm90_takes_long(DType dtype, int head_size);
Status attention_sm90_long(DType dtype, const void* qkv, int rows, const WindowedWork& work, int heads, void* context,
                           TensorMaps& maps, const Stream& stream);

}  // namespace embert
