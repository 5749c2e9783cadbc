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
cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) {
  return cudaSuccess;
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
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  ++living.streams;
  *stream = reinterpret_cast<cudaStream_t>(1);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) {
  --living.streams;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  tell("synchronize\n");
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  ++living.events;
  *event = reinterpret_cast<cudaEvent_t>(1);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) {
  --living.events;
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
cudaError_t cudaMemset(void*, int, size_t) {  // memory that was never written is 0
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  ++living.graphs;
  *graph = reinterpret_cast<cudaGraph_t>(1);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* graph, cudaGraph_t, unsigned long long) {
  if (fails(faults.instantiations)) return cudaErrorMemoryAllocation;
  ++living.executables;
  *graph = reinterpret_cast<cudaGraphExec_t>(1);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t) {
  --living.graphs;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) {
  --living.executables;
  return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) {
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
