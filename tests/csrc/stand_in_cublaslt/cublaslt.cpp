// A cuBLASLt that multiplies integers alone, counts what it has made, and fails the call that it is told to. Integers
// it takes as its documentation says: operands transposed and not, multiples of 4, INT32 throughout.
#include "cublasLt.h"

#include <cstdio>
#include <cstring>

extern "C" {
__attribute__((visibility("default"))) int stand_in_living = 0;
__attribute__((visibility("default"))) int stand_in_calls_left = -1;  // until one fails; -1: none does
__attribute__((visibility("default"))) cublasStatus_t stand_in_failure = CUBLAS_STATUS_ALLOC_FAILED;
}

namespace {

cublasStatus_t next() {
  if (stand_in_calls_left < 0) return CUBLAS_STATUS_SUCCESS;
  return stand_in_calls_left-- == 0 ? stand_in_failure : CUBLAS_STATUS_SUCCESS;
}

// What a handle is for, whatever its kind.
struct Made {
  cudaDataType type = CUDA_R_32F;  // of a layout's elements; of a product's factors
  uint64_t height = 0, width = 0;
  int64_t pitch = 0;
  cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  cublasOperation_t transposed = CUBLAS_OP_N;
};
template <typename Handle>
Made& made(Handle handle) {
  return *reinterpret_cast<Made*>(handle);
}

template <typename Handle>
cublasStatus_t make(Handle* handle, const Made& of = {}) {
  const cublasStatus_t status = next();
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  ++stand_in_living;
  *handle = reinterpret_cast<Handle>(new Made(of));
  return status;
}
template <typename Handle>
cublasStatus_t destroy(Handle handle) {
  --stand_in_living;
  delete reinterpret_cast<Made*>(handle);
  return CUBLAS_STATUS_SUCCESS;
}

bool is_in_fours(const Made& layout) {
  return layout.pitch % 4 == 0 && layout.pitch >= int64_t(layout.height);
}

// d = aᵀ·b in columns, as the caller's rows are to it.
cublasStatus_t multiply_integers(const Made& product, const int32_t* alpha, const int8_t* a, const Made& a_is,
                                 const int8_t* b, const Made& b_is, const int32_t* beta, int32_t* d, const Made& d_is) {
  const bool takes = product.type == CUDA_R_32I && product.transposed == CUBLAS_OP_T && a_is.type == CUDA_R_8I &&
                     b_is.type == CUDA_R_8I && d_is.type == CUDA_R_32I && is_in_fours(a_is) && is_in_fours(b_is) &&
                     is_in_fours(d_is) && a_is.height == b_is.height && a_is.width == d_is.height &&
                     b_is.width == d_is.width && a_is.height % 4 == 0 && a_is.width % 4 == 0 && b_is.width > 16;
  if (!takes || *alpha != 1 || *beta != 0) return CUBLAS_STATUS_NOT_SUPPORTED;
  std::fprintf(stderr, "integers rows=%d\n", int(b_is.width));
  for (uint64_t row = 0; row < b_is.width; ++row)
    for (uint64_t n = 0; n < a_is.width; ++n) {
      int32_t sum = 0;
      for (uint64_t k = 0; k < a_is.height; ++k) sum += a[n * a_is.pitch + k] * b[row * b_is.pitch + k];
      d[row * d_is.pitch + n] = sum;
    }
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  return make(handle);
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  return destroy(handle);
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t product, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t a_is, const void* b, cublasLtMatrixLayout_t b_is, const void* beta,
                              const void*, cublasLtMatrixLayout_t, void* d, cublasLtMatrixLayout_t d_is,
                              const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t) {
  const cublasStatus_t status = next();
  if (status != CUBLAS_STATUS_SUCCESS || made(product).compute != CUBLAS_COMPUTE_32I) return status;
  return multiply_integers(made(product), static_cast<const int32_t*>(alpha), static_cast<const int8_t*>(a), made(a_is),
                           static_cast<const int8_t*>(b), made(b_is), static_cast<const int32_t*>(beta),
                           static_cast<int32_t*>(d), made(d_is));
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute, cudaDataType_t type) {
  Made of;
  of.compute = compute, of.type = type;
  return make(desc, of);
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  return destroy(desc);
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
  if (attribute == CUBLASLT_MATMUL_DESC_TRANSA) std::memcpy(&made(desc).transposed, value, bytes);
  return next();
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t height,
                                          uint64_t width, int64_t pitch) {
  Made of;
  of.type = type, of.height = height, of.width = width, of.pitch = pitch;
  return make(layout, of);
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  return destroy(layout);
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  return make(preference);
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  return destroy(preference);
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t,
                                                    const void*, size_t) {
  return next();
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int, cublasLtMatmulHeuristicResult_t*,
                                              int* found) {
  *found = 1;
  return next();
}
cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                       cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                       const cublasLtMatmulAlgo_t*, cublasLtMatmulHeuristicResult_t*) {
  return next();
}
