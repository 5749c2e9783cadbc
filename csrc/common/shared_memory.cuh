// Shared memory: its addresses, asynchronous copies into it, and the matrices that warps load from it and store to it.
#pragma once

#include <cstdint>

namespace embert {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes from global to shared memory without using registers; writes zeros where `valid` is false.
__device__ __forceinline__ void cp_async(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0));
}
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;");
}
// Waits until at most kLeft committed groups are in flight.
template <int kLeft>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// Loads four 8×8 matrices of 16-bit elements. Lanes 8i … 8i+7 give the addresses of matrix i's rows.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

namespace sm90 {

// Stores four such matrices (sm_90).
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

__device__ __forceinline__ void st_shared(uint32_t address, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

// A load that stays where it is written. The compiler moves an ordinary load to the first use of its value, which saves
// registers.
__device__ __forceinline__ void ld_shared(uint32_t address, float2& to) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(to.x), "=f"(to.y) : "r"(address));
}
__device__ __forceinline__ void ld_shared(uint32_t address, float4& to) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(to.x), "=f"(to.y), "=f"(to.z), "=f"(to.w)
               : "r"(address));
}

}  // namespace sm90
}  // namespace embert
