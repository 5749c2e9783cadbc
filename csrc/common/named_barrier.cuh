// Barriers for some of a block's threads. A block has 16 of them; this enum names every number in use.
#pragma once

namespace embert {

// Kernels do not share barriers, so two kernels may use the same number. Where several blocks share a multiprocessor, a
// number has to be a constant: one in a register counts as all 16, of which a multiprocessor has 64.
enum NamedBarrier : int {
  kBlockBarrier = 0,     // used by __syncthreads
  kScalesBarrier = 1,    // small_m.cuh: the rows' scales are in shared memory
  kConsumerBarrier = 1,  // + consumer; gemm/: the four warps of a consumer
  kPairBarrier = 1,      // + pair; attention/short.cuh: the two warps of a (sequence, head)
  kGroupBarrier = 1,     // + warpgroup; attention/sm90/long_texts.cu: its four warps
};

// Waits until `threads` threads have arrived, the waiting ones included.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Arrives without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace embert
