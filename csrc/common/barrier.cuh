// Barriers: of a cluster, mbarriers in shared memory, named barriers of some threads of a block, flags between blocks.
#pragma once

#include <cstdint>

namespace embert {

// A block's rank in its thread block cluster (sm_90). Without a cluster, and on older devices, each block is a cluster.
__device__ __forceinline__ int cluster_rank() {
#if __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return int(rank);
#else
  return 0;
#endif
}

// Barriers for some of a block's threads. A block has 16 of them; this enum names every number in use.

// Kernels do not share barriers, so two kernels may use the same number.
enum NamedBarrier : int {
  kBlockBarrier = 0,     // used by __syncthreads
  kScalesBarrier = 1,    // small_m.cuh: the rows' scales are in shared memory
  kConsumerBarrier = 1,  // + consumer; gemm/: the four warps of a consumer
  kPairBarrier = 1,      // + pair; attention/short.cuh: the two warps of a (sequence, head)
  kGroupBarrier = 1,     // + warpgroup; attention/sm90/: its four warps
};

// Waits until `threads` threads have arrived, the waiting ones included.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Waits at the barrier kFirst or the next one, for kThreads threads each. Where several blocks share a multiprocessor,
// numbers have to be constants: one in a register counts as all 16, of which a multiprocessor has 64.
template <int kFirst, int kThreads>
__device__ __forceinline__ void named_barrier_sync_either(int which) {
  if (which == 0)
    asm volatile("bar.sync %0, %1;" ::"n"(kFirst), "n"(kThreads) : "memory");
  else
    asm volatile("bar.sync %0, %1;" ::"n"(kFirst + 1), "n"(kThreads) : "memory");
}
// Arrives without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace embert

namespace embert::sm90 {

// mbarrier (sm_90): a barrier in shared memory that counts arrivals and bytes. When both are complete, its phase flips.

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Returns when every block of the cluster has initialized its barriers and called the fence above. For all threads of
// the cluster. The arrival orders no memory, which saves a fence.
__device__ __forceinline__ void wait_for_cluster_init() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
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

// True if the phase with this parity has ended; does not wait.
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

// Flags in global memory, which order work between blocks of one launch.

__device__ __forceinline__ void set_flag(int* flag) {
  asm volatile("fence.acq_rel.gpu;\nst.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory");
}
__device__ __forceinline__ void wait_flag(const int* flag) {
  int set = 0;
  while (set == 0) asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(set) : "l"(flag) : "memory");
}

}  // namespace embert::sm90
