// Queries the architecture that a kernel's machine code was compiled for. The host code of a build cannot know which
// code the driver selected for this GPU.

#include "common/capability.h"
#include "common/memory.h"

namespace embert {
namespace {

__global__ void build_kernel(int* answer) {
#if defined(__CUDA_ARCH__)
  answer[0] = __CUDA_ARCH__;
#endif
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  answer[1] = 1;
#endif
}

}  // namespace

Status read_build(Build& build, const Stream& stream) {
  HostBuffer result;  // the device writes it directly
  EMBERT_TRY(result.allocate(2 * sizeof(int)));
  int* const answer = result.as<int>();
  answer[0] = answer[1] = 0;
  EMBERT_TRY(launch("build", build_kernel, 1, 1, 0, stream, answer));
  EMBERT_CUDA(cudaStreamSynchronize(stream.handle));
  build = {answer[0], answer[1] != 0};
  return {};
}

}  // namespace embert
