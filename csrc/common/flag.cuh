// Flags in global memory, which order work between blocks of one launch.
#pragma once

namespace embert::sm90 {

__device__ __forceinline__ void set_flag(int* flag) {
  asm volatile("fence.acq_rel.gpu;\nst.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory");
}
__device__ __forceinline__ void wait_flag(const int* flag) {
  int set = 0;
  while (set == 0) asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(set) : "l"(flag) : "memory");
}

}  // namespace embert::sm90
