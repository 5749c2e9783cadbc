// Shared by all functions of _cuda_testing: device memory as plain addresses, and a stream whose launches a graph
// replays and times.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bindings/address.h"
#include "bindings/status.h"
#include "common/launch.h"
#include "common/tensor_maps.h"
#include "gemm/gemm.h"

namespace embert {

// A stream on the current device, and launches on it. A recorded graph of them can be replayed and timed.
class Bench {
 public:
  Bench() {
    raise(Status::cuda(cudaStreamCreateWithFlags(&stream_.handle, cudaStreamNonBlocking), "cudaStreamCreate"));
  }
  ~Bench() {
    if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
    cudaStreamDestroy(stream_.handle);
  }
  void check(const Status& status) const { raise(status); }
  void check(cudaError_t code, const char* where) const { raise(Status::cuda(code, where)); }
  const Stream& stream() const { return stream_; }
  TensorMaps* maps(DType type) {
    maps_ = std::make_unique<TensorMaps>(type);
    check(maps_->open());
    return maps_.get();
  }

  Address allocate(size_t bytes) {
    void* allocated = nullptr;
    check(cudaMalloc(&allocated, bytes), "cudaMalloc");
    return {reinterpret_cast<uintptr_t>(allocated)};
  }
  void free(Address address) { check(cudaFree(address), "cudaFree"); }
  void upload(Address to,
              nanobind::ndarray<const uint8_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu> from) {
    check(cudaMemcpyAsync(to, from.data(), from.shape(0), cudaMemcpyHostToDevice, stream_.handle), "upload");
    synchronize();
  }
  void download(nanobind::ndarray<uint8_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu> to,
                Address from) {
    check(cudaMemcpyAsync(to.data(), from, to.shape(0), cudaMemcpyDeviceToHost, stream_.handle), "download");
    synchronize();
  }
  void fill(Address to, int byte, size_t bytes) { check(cudaMemsetAsync(to, byte, bytes, stream_.handle), "fill"); }
  void copy(Address to, Address from, size_t bytes) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_.handle), "copy");
  }
  void synchronize() {
    nanobind::gil_scoped_release release;
    const cudaError_t code = cudaStreamSynchronize(stream_.handle);
    nanobind::gil_scoped_acquire acquire;
    check(code, "synchronize");
  }

  void begin_recording() {
    check(cudaStreamBeginCapture(stream_.handle, cudaStreamCaptureModeThreadLocal), "begin_recording");
  }
  void end_recording() {
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(stream_.handle, &graph), "end_recording");
    const std::unique_ptr<CUgraph_st, decltype(&cudaGraphDestroy)> owner(graph, cudaGraphDestroy);
    check(cudaGraphGetNodes(graph, nullptr, &recorded_), "cudaGraphGetNodes");
    if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
    graph_ = nullptr;
    check(cudaGraphInstantiate(&graph_, graph, 0), "cudaGraphInstantiate");
  }
  size_t recorded() const { return recorded_; }
  // Milliseconds of each of `times` replays, after two warm-up replays.
  std::vector<float> replay(int times) {
    cudaEvent_t from = nullptr, to = nullptr;
    using Event = std::unique_ptr<CUevent_st, decltype(&cudaEventDestroy)>;
    check(cudaEventCreate(&from), "cudaEventCreate");
    const Event owner_of_from(from, cudaEventDestroy);
    check(cudaEventCreate(&to), "cudaEventCreate");
    const Event owner_of_to(to, cudaEventDestroy);
    std::vector<float> all(times);
    for (int i = -2; i < times; ++i) {
      check(cudaEventRecord(from, stream_.handle), "cudaEventRecord");
      check(cudaGraphLaunch(graph_, stream_.handle), "cudaGraphLaunch");
      check(cudaEventRecord(to, stream_.handle), "cudaEventRecord");
      check(cudaEventSynchronize(to), "replay");
      if (i >= 0) check(cudaEventElapsedTime(&all[i], from, to), "cudaEventElapsedTime");
    }
    return all;
  }

 private:
  Stream stream_;
  cudaGraphExec_t graph_ = nullptr;
  size_t recorded_ = 0;
  std::unique_ptr<TensorMaps> maps_;
};

inline std::unique_ptr<GemmProvider> open_provider(Bench& bench, const std::string& name, const std::string& library,
                                                   DType type) {
  std::unique_ptr<GemmProvider> provider;
  bench.check(name == "hopper" ? make_sm90(type, provider) : make_cublaslt(type, library, provider));
  return provider;
}

// A GEMM, a feed-forward layer or maxima, with the provider.
template <typename Made>
struct Provided {
  std::unique_ptr<GemmProvider> provider;
  std::unique_ptr<Made> made;
  int splits = 1;  // of the last run's row statistics
};

}  // namespace embert
