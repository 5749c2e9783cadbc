// The index of a warp and of a lane in the forms that compile best, and the register counts of warpgroups.
#pragma once

#include <cstdint>

namespace embert::sm90 {

// The warp's index in its block. It is read from lane 0, so that the compiler knows that all lanes have the same value.
// Values that depend on a branch on it then stay in uniform registers, in particular wgmma's operands. Otherwise four
// moves between the kinds of registers (R2UR) precede every wgmma.
__device__ __forceinline__ int warp_index() {
  return __shfl_sync(~0u, threadIdx.x / 32, 0);
}

// The lane's index, read again. Values derived from an earlier read need not stay in registers until here.
__device__ __forceinline__ int lane_index() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// Keeps a value in its register: the compiler cannot recompute it where it is used.
__device__ __forceinline__ void keep(uint32_t& value) {
  asm volatile("" : "+r"(value));
}

// True in one lane of a full warp. The compiler then knows that only one thread continues. Otherwise it puts a loop
// around every instruction that takes uniform registers.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n.reg .pred chosen;\n"
      "elect.sync _|chosen, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, chosen;\n}"
      : "=r"(elected));
  return elected != 0;
}

// Registers a thread, for a whole warpgroup: one deallocates them before another one can allocate more.
template <int kRegisters>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace embert::sm90
