// The device's side of a launch: programmatic dependent launch (PTX griddepcontrol, sm_90; launch.h has the host's
// side), and the body of a kernel that needs sm_90a when it is compiled for any other architecture.
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

// A trap fails the launch, which the host sees. A body that returned would leave rows unwritten, and they would be
// pooled and normalized like valid ones. The PTX has the kernel's name.
#define EMBERT_TRAP(kernel) asm volatile("// " kernel ": not compiled for sm_90a\n\ttrap;")
// A kernel's body of one statement, which needs sm_90a.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define EMBERT_SM90A(kernel, ...) __VA_ARGS__
#else
#define EMBERT_SM90A(kernel, ...) EMBERT_TRAP(kernel)
#endif
