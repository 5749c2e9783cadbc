// mbarrier (sm_90): a barrier in shared memory that counts arrivals and bytes. When both are complete, its phase flips.
#pragma once

#include <cstdint>

#include "common/cluster.cuh"

namespace embert::sm90 {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Returns when every block of the cluster has initialized its barriers and called the fence above.
__device__ __forceinline__ void wait_for_cluster_init() {
  cluster_arrive_relaxed();
  cluster_wait();
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives at the barrier at the same address in another block of the cluster, or in this one.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier, uint32_t block) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(block)
      : "memory");
}
// Waits for the end of the phase with this parity. The scope is the default one: at cluster scope every wait and
// arrival orders all memory, which doubles the time of a step.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t phase) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n}" ::"r"(barrier),
      "r"(phase)
      : "memory");
}

// Whether the phase with this parity has ended; does not wait.
__device__ __forceinline__ bool mbarrier_test_wait(uint32_t barrier, uint32_t phase) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(phase)
      : "memory");
  return done != 0;
}

}  // namespace embert::sm90
