#include "common/tensor_maps.h"

#include <cuda_runtime_api.h>

namespace embert {

Status TensorMaps::open() {
  void* descriptor = nullptr;
  cudaDriverEntryPointQueryResult result{};
  EMBERT_CUDA(
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &descriptor, 12000, cudaEnableDefault, &result));
  if (descriptor == nullptr)
    return Status::refused("the driver has no cuTensorMapEncodeTiled: it is older than CUDA 12");
  encode_ = reinterpret_cast<decltype(encode_)>(descriptor);
  return {};
}

Status TensorMaps::get(const BoxedMatrix& matrix, const CUtensorMap*& descriptor) {
  const auto key = std::make_tuple(matrix.data, matrix.columns, matrix.box_rows, matrix.box_columns, matrix.boxes);
  Cached& cached = cache_[key];
  descriptor = &cached.map;
  if (cached.rows == matrix.rows) return {};
  const bool is_cut = matrix.boxes > 0;
  const cuuint64_t width = is_cut ? matrix.box_columns : matrix.columns;
  const cuuint64_t sizes[3] = {width, cuuint64_t(matrix.rows), matrix.columns / width};
  const bool is_bytes = matrix.box_columns == kByteColumns;
  const cuuint64_t size = is_bytes ? 1 : 2;
  const cuuint64_t pitches[2] = {cuuint64_t(matrix.columns) * size, width * size};
  const cuuint32_t box[3] = {cuuint32_t(matrix.box_columns), cuuint32_t(matrix.box_rows), cuuint32_t(matrix.boxes)};
  const cuuint32_t strides[3] = {1, 1, 1};
  const CUtensorMapDataType half_type =
      dtype_ == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult code =
      encode_(&cached.map, is_bytes ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : half_type, is_cut ? 3 : 2,
              const_cast<void*>(matrix.data), sizes, pitches, box, strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
              matrix.box_columns == 32 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
              CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (code == CUDA_SUCCESS) {
    cached.rows = matrix.rows;
    return {};
  }
  cache_.erase(key);
  return Status::refused("cuTensorMapEncodeTiled of [", matrix.rows, ", ", matrix.columns, "]: CUresult ", int(code));
}

}  // namespace embert
