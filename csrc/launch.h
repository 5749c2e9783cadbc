// One way to launch every kernel: with its name, its shapes for the error message, and (from sm_90 on) programmatic
// dependent launch, so that the next kernel's blocks are resident and its weights on their way while this one ends.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "status.h"

namespace embert {

struct Stream {
  cudaStream_t handle = nullptr;
  bool dependent_launch = false;  // only where the device has it (sm_90) and every kernel on the stream is ours
  // Kernels of many rows begin with the last ones: with what the one before has just written, which is still in the L2
  // cache. So each goes the other way than the one before it.
  bool backwards = false;
  const Stream& turned() {
    backwards = !backwards;
    return *this;
  }
};

// `cluster` blocks, neighbours in x, form a cluster (sm_90; up to eight).
template <typename... Parameters, typename... Arguments>
Status launch_clusters(const char* name, void (*kernel)(Parameters...), int cluster, dim3 grid, dim3 block,
                       size_t shared_bytes, const Stream& stream, Arguments&&... arguments) {
  if (grid.x == 0 || grid.y == 0) return {};
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream.handle;
  config.attrs = attributes;
  if (stream.dependent_launch) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {unsigned(cluster), 1, 1};
  }
  const cudaError_t code = cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
  if (code == cudaSuccess) return {};
  const std::string where = std::string(name) + " (grid " + std::to_string(grid.x) + "x" + std::to_string(grid.y) +
                            ", block " + std::to_string(block.x) + "x" + std::to_string(block.y) + ", " +
                            std::to_string(shared_bytes) + " B shared)";
  return Status::cuda(code, where.c_str());
}

template <typename... Parameters, typename... Arguments>
Status launch(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
              const Stream& stream, Arguments&&... arguments) {
  return launch_clusters(name, kernel, 1, grid, block, shared_bytes, stream, std::forward<Arguments>(arguments)...);
}

}  // namespace embert
