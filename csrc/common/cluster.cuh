// Blocks of a thread block cluster (sm_90): their ranks, their barrier, and each other's shared memory. Without a
// cluster, and on older devices, a block is a cluster of its own.
#pragma once

#include <cstdint>

namespace embert {

__device__ __forceinline__ int cluster_rank() {
#if __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return int(rank);
#else
  return 0;
#endif
}

// For all threads of the cluster's blocks that have not exited. Writes before `mbarrier_arrive` are visible after
// `wait`.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
// Orders no memory, which saves a fence.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// The address of one of this block's shared variables in another block of the cluster.
template <typename T>
__device__ __forceinline__ T* map_shared_rank(T* local, int rank) {
#if __CUDA_ARCH__ >= 900
  uint64_t remote;
  asm("mapa.u64 %0, %1, %2;" : "=l"(remote) : "l"(local), "r"(rank));
  return reinterpret_cast<T*>(remote);
#else
  return local;
#endif
}

}  // namespace embert
