// Owning types for device memory and pinned host memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <utility>

#include "common/status.h"

namespace embert {

// kPinned: host memory that the device can access directly; otherwise device memory.
template <bool kPinned>
class Allocation {
 public:
  Allocation() = default;
  ~Allocation() { release(); }
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;

  // Frees the present memory first; the contents are not kept.
  Status allocate(size_t bytes) {
    release();
    if (bytes == 0) return {};
    if constexpr (kPinned) {
      EMBERT_CUDA(cudaMallocHost(&data_, bytes));
    } else {
      EMBERT_CUDA(cudaMalloc(&data_, bytes));
    }
    bytes_ = bytes;
    return {};
  }
  // All bytes are 0 when this returns, for any stream. cudaMemset runs on the legacy stream, which is not ordered
  // before non-blocking streams, so the host waits for it.
  Status zero() {
    EMBERT_CUDA(cudaMemset(data_, 0, bytes_));
    EMBERT_CUDA(cudaStreamSynchronize(nullptr));
    return {};
  }
  void release() {
    if (data_ == nullptr) return;
    if constexpr (kPinned) {
      cudaFreeHost(data_);
    } else {
      cudaFree(data_);
    }
    data_ = nullptr;
    bytes_ = 0;
  }

  template <typename T = uint8_t>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

using DeviceBuffer = Allocation<false>;
using HostBuffer = Allocation<true>;

// Divides one allocation into aligned arrays. A first pass without a base computes the size.
class Arena {
 public:
  explicit Arena(uint8_t* base) : base_(base) {}
  uint8_t* take(size_t bytes) {
    uint8_t* const piece = base_ + used_;
    used_ += (bytes + 255) / 256 * 256;
    return piece;
  }
  size_t used() const { return used_; }

 private:
  uint8_t* base_;
  size_t used_ = 0;
};

}  // namespace embert
