// The device's side of programmatic dependent launch (PTX griddepcontrol, sm_90; launch.h has the host's side).
#pragma once

namespace embert {

// Lets the next kernel's blocks start as soon as every block of this one has called it or exited.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Returns when all earlier kernels have ended and their writes are visible. To be called before the first read of an
// earlier kernel's output, and before the first write.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace embert
