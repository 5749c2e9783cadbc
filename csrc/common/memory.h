// Owning types for device memory, pinned host memory and the host memory of results.
#pragma once

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
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
  template <typename T = uint8_t>
  T* take(size_t count) {
    uint8_t* const piece = base_ + used_;
    used_ += (count * sizeof(T) + 255) / 256 * 256;
    return reinterpret_cast<T*>(piece);
  }
  size_t used() const { return used_; }

 private:
  uint8_t* base_;
  size_t used_ = 0;
};

// Blocks of floats for results. Touching fresh pages takes longer than the copy into them, so large blocks return to
// the pool when their owner frees them: as many as there are batches in flight. Any thread may allocate or free. A
// block may be freed after the encoder is destroyed.
class HostBlocks : public std::enable_shared_from_this<HostBlocks> {
 public:
  // Frees a block, or returns it to its pool.
  struct Deleter {
    std::shared_ptr<HostBlocks> to;  // null: an array of `new`
    size_t bytes = 0;
    void operator()(float* block) const noexcept {
      if (to == nullptr) return delete[] block;
      to->release({block, bytes});
    }
  };
  using Floats = std::unique_ptr<float[], Deleter>;

  HostBlocks() = default;
  HostBlocks(const HostBlocks&) = delete;
  HostBlocks& operator=(const HostBlocks&) = delete;
  ~HostBlocks() {
    for (const Block& block : pool_) std::free(block.start);
  }

  // This many floats, uninitialized. Throws std::bad_alloc.
  Floats allocate(size_t count) {
    size_t bytes = count * sizeof(float);
    if (bytes < kMin) return Floats(new float[std::max<size_t>(count, 1)]);
    Block block = take_from_pool(bytes);
    if (block.start == nullptr) {
      bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
      block = {static_cast<float*>(std::aligned_alloc(kHugePage, bytes)), bytes};
      if (block.start == nullptr) throw std::bad_alloc();
      madvise(block.start, bytes, MADV_HUGEPAGE);  // without huge pages, pages are small
    }
    return Floats(block.start, Deleter{shared_from_this(), block.bytes});
  }

 private:
  static constexpr size_t kHugePage = 2 << 20;
  static constexpr size_t kMin = 1 << 20;  // bytes of a block that the pool keeps: malloc keeps smaller ones itself
  static constexpr size_t kMinUse = 4;     // the least part of a block that an allocation must use

  struct Block {
    float* start = nullptr;
    size_t bytes = 0;
  };

  Block take_from_pool(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Block& block : pool_) {
      if (block.bytes >= bytes && block.bytes / kMinUse <= bytes) return std::exchange(block, Block());
    }
    return {};
  }

  // Evicts the smallest one: an empty entry first.
  void release(Block block) noexcept {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (Block& pooled : pool_) {
        if (pooled.bytes < block.bytes) std::swap(pooled, block);
      }
    }
    std::free(block.start);
  }

  std::mutex mutex_;
  std::array<Block, 2> pool_{};
};

}  // namespace embert
