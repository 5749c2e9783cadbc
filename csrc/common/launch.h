// Launches every kernel: with its name and shapes for the error message, and from sm_90 on with programmatic dependent
// launch. The next kernel's blocks are then resident, and its weights in flight, while this kernel ends.
#pragma once

#include <cuda_runtime.h>

#include <string>
#include <type_traits>

#include "common/status.h"

namespace embert {

struct Stream {
  cudaStream_t handle = nullptr;
  bool dependent_launch = false;  // only where the device has it (sm_90) and every kernel on the stream is ours
  // A kernel for many rows starts with the rows that the previous kernel wrote last: they are still in the L2 cache. So
  // the direction alternates from kernel to kernel.
  bool backwards = false;
  const Stream& alternate_direction() {
    backwards = !backwards;
    return *this;
  }
};

// Calls `run` with the value as a compile-time constant: one of these, the last one if it is none of the others.
template <auto kFirst, auto... kOthers, typename Value, typename Run>
Status with_constant(Value value, const Run& run) {
  if constexpr (sizeof...(kOthers) > 0) {
    if (value != kFirst) return with_constant<kOthers...>(value, run);
  }
  return run(std::integral_constant<Value, kFirst>());
}

// Allows a kernel this number of bytes of dynamic shared memory: more than 48 KB, with static ones, must be requested.
template <typename Kernel>
Status allow_shared_memory(Kernel* kernel, size_t bytes, size_t static_bytes = 0) {
  if (static_bytes + bytes > 48 * 1024)
    EMBERT_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)));
  return {};
}

// `cluster` blocks that are adjacent in x form a cluster (sm_90; at most eight).
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
