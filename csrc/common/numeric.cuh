// The storage types on the device (half, bfloat16, float): loads, stores and conversions. Arithmetic is always FP32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/types.h"

namespace embert {

using half_t = __half;
using bfloat_t = __nv_bfloat16;

// Calls run(T()) with the type of stored rows.
template <typename Run>
auto with_dtype(DType dtype, const Run& run) {
  switch (dtype) {
    case DType::kFloat16:
      return run(half_t());
    case DType::kBFloat16:
      return run(bfloat_t());
    default:
      return run(float());
  }
}
// The same where it has 16 bits.
template <typename Run>
auto with_half_dtype(DType dtype, const Run& run) {
  return dtype == DType::kFloat16 ? run(half_t()) : run(bfloat_t());
}

// 16 bytes of T: the widest load and store of a thread.
template <typename T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T values[kSize];
};

__device__ __forceinline__ float to_float(float x) {
  return x;
}
__device__ __forceinline__ float to_float(half_t x) {
  return __half2float(x);
}
__device__ __forceinline__ float to_float(bfloat_t x) {
  return __bfloat162float(x);
}

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ half_t from_float<half_t>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ bfloat_t from_float<bfloat_t>(float x) {
  return __float2bfloat16_rn(x);
}

// Two values of FP16 and the register that holds them.
__device__ __forceinline__ __half2 as_half2(uint32_t bits) {
  return *reinterpret_cast<const __half2*>(&bits);
}
__device__ __forceinline__ uint32_t as_bits(__half2 two) {
  return *reinterpret_cast<const uint32_t*>(&two);
}

// Two values rounded into one 32-bit register, the first in the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack_two(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack_two<half_t>(float low, float high) {
  const __half2 two = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&two);
}
template <>
__device__ __forceinline__ uint32_t pack_two<bfloat_t>(float low, float high) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&two);
}

// The inverse.
template <typename T>
__device__ __forceinline__ float2 unpack_two(uint32_t two);
template <>
__device__ __forceinline__ float2 unpack_two<half_t>(uint32_t two) {
  return __half22float2(*reinterpret_cast<const __half2*>(&two));
}
template <>
__device__ __forceinline__ float2 unpack_two<bfloat_t>(uint32_t two) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&two));
}

template <typename T>
__device__ __forceinline__ Pack<T> load_pack(const T* address) {
  Pack<T> pack;
  *reinterpret_cast<uint4*>(&pack) = __ldg(reinterpret_cast<const uint4*>(address));
  return pack;
}
// For data that another kernel wrote. It avoids the read-only path, which a dependent launch may have filled too early.
template <typename T>
__device__ __forceinline__ Pack<T> load_pack_coherent(const T* address) {
  Pack<T> pack;
  *reinterpret_cast<uint4*>(&pack) = *reinterpret_cast<const uint4*>(address);
  return pack;
}
template <typename T>
__device__ __forceinline__ void store_pack(T* address, const Pack<T>& pack) {
  *reinterpret_cast<uint4*>(address) = *reinterpret_cast<const uint4*>(&pack);
}

// Keeps the compiler from converting a pack's values before this point. As FP32 they take twice the registers.
template <typename T>
__device__ __forceinline__ void keep_packed(Pack<T>& pack) {
  auto* const words = reinterpret_cast<uint32_t*>(&pack);
  asm volatile("" : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3]));
}

__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// The larger number; NaN if either is (sm_80).
__device__ __forceinline__ float larger(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

// Butterfly reductions: every lane gets the same bits, in an order that does not depend on the data.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

}  // namespace embert
