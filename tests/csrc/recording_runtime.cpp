// CUDA's runtime, of which nothing but memory is real: recording_device.h.

#include <sys/mman.h>

#include <cstring>

#include "recording_device.h"

bool computes = false, telling = false;
int pairs_of_text = 2;
Faults faults;
Living living;

namespace {

// Address space, of which nothing is taken before it is written.
constexpr size_t kPoolBytes = size_t(1) << 36;
uint8_t* const pool_memory = static_cast<uint8_t*>(
    mmap(nullptr, kPoolBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
size_t pool_used = 0;

template <typename Handle>
cudaError_t create(Handle* handle, int& count) {
  ++count;
  *handle = reinterpret_cast<Handle>(1);
  return cudaSuccess;
}

}  // namespace

long at(const void* address) {
  return address == nullptr ? -1 : static_cast<const uint8_t*>(address) - pool_memory;
}

bool fails(int& calls_left) {
  if (calls_left < 0) return false;
  if (calls_left == 0) return true;
  --calls_left;
  return false;
}

extern "C" {
// Calls that only succeed. Memory that was never written is 0.
#define EMBERT_SUCCEEDS(name, ...) \
  cudaError_t name(__VA_ARGS__) {  \
    return cudaSuccess;            \
  }
EMBERT_SUCCEEDS(cudaGetLastError)
EMBERT_SUCCEEDS(cudaSetDevice, int)
EMBERT_SUCCEEDS(cudaStreamWaitEvent, cudaStream_t, cudaEvent_t, unsigned)
EMBERT_SUCCEEDS(cudaEventRecord, cudaEvent_t, cudaStream_t)
EMBERT_SUCCEEDS(cudaEventSynchronize, cudaEvent_t)
EMBERT_SUCCEEDS(cudaMemset, void*, int, size_t)
EMBERT_SUCCEEDS(cudaMemsetAsync, void*, int, size_t, cudaStream_t)
EMBERT_SUCCEEDS(cudaStreamBeginCapture, cudaStream_t, cudaStreamCaptureMode)
EMBERT_SUCCEEDS(cudaGraphUpload, cudaGraphExec_t, cudaStream_t)

// Calls that destroy something, which is counted.
#define EMBERT_DESTROYS(count, name, Type) \
  cudaError_t name(Type) {                 \
    --living.count;                        \
    return cudaSuccess;                    \
  }
EMBERT_DESTROYS(streams, cudaStreamDestroy, cudaStream_t)
EMBERT_DESTROYS(events, cudaEventDestroy, cudaEvent_t)
EMBERT_DESTROYS(graphs, cudaGraphDestroy, cudaGraph_t)
EMBERT_DESTROYS(executables, cudaGraphExecDestroy, cudaGraphExec_t)

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return create(stream, living.streams);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return create(event, living.events);
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  return create(graph, living.graphs);
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* graph, cudaGraph_t, unsigned long long) {
  return fails(faults.instantiations) ? cudaErrorMemoryAllocation : create(graph, living.executables);
}
cudaError_t cudaMalloc(void** address, size_t bytes) {
  tell("allocate bytes=%zu\n", bytes);
  *address = nullptr;
  if (fails(faults.allocations)) return cudaErrorMemoryAllocation;
  ++living.allocations;
  *address = pool_memory + pool_used;
  pool_used += (bytes + 4095) / 4096 * 4096;
  return pool_used <= kPoolBytes ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaMallocHost(void** address, size_t bytes) {
  return cudaMalloc(address, bytes);
}
cudaError_t cudaFree(void* address) {
  if (address != nullptr) --living.allocations;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* address) {
  return cudaFree(address);
}
cudaError_t cudaMemGetInfo(size_t* left, size_t* total) {
  *left = *total = kPoolBytes;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::memset(properties, 0, sizeof *properties);
  std::strcpy(properties->name, "A GPU");
  properties->major = faults.major, properties->minor = faults.minor;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  tell("synchronize\n");
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  tell("copy to=%ld from=%ld bytes=%zu kind=%d\n", at(to), at(from), bytes, int(kind));
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void*, size_t bytes, cudaMemcpyKind) {
  std::memset(to, 0, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows,
                              cudaMemcpyKind, cudaStream_t) {
  for (size_t row = 0; row < rows; ++row)
    std::memcpy(static_cast<uint8_t*>(to) + row * to_pitch, static_cast<const uint8_t*>(from) + row * from_pitch,
                width);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  tell("graph\n");
  return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t) {
  return "error";
}
const char* cudaGetErrorString(cudaError_t) {
  return "of the recording device";
}
}
