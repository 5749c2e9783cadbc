// TMA (sm_90): copies boxes of a matrix between global and shared memory, and swizzles them.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace embert::sm90 {

// Copies the box at (column, row). Its bytes arrive at `barrier`, an mbarrier.
__device__ __forceinline__ void tma_load(const CUtensorMap* map, uint32_t to, uint32_t barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
          "r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}
// The same for bytes that are not read again soon: the L2 cache evicts them first.
__device__ __forceinline__ void tma_load_evict_first(const CUtensorMap* map, uint32_t to, uint32_t barrier, int column,
                                                     int row) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
      "{%3, %4}], [%2], %5;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "l"(policy)
      : "memory");
}
// Copies the box to the same address in every block of `mask`. The bytes arrive at each block's own barrier.
__device__ __forceinline__ void tma_load_multicast(uint16_t mask, const CUtensorMap* map, uint32_t to, uint32_t barrier,
                                                   int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%3, "
      "%4}], [%2], %5;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "h"(mask)
      : "memory");
}
// For a matrix that is mapped in chunks of 64 columns: copies the boxes of adjacent chunks.
__device__ __forceinline__ void tma_load_3d(const CUtensorMap* map, uint32_t to, uint32_t barrier, int chunk, int row) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(0), "r"(row), "r"(chunk)
      : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
               "r"(column), "r"(row)
               : "memory");
}
__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until at most kLeft committed groups of stores have yet to read shared memory.
template <int kLeft>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}
// Makes ordinary stores to shared memory visible to TMA.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Stores boxes that the lanes of a warp have written to shared memory, `box_bytes` apart, after one fence: it waits
// some 270 cycles for everything in flight. Box i goes to (column + i * column_step, row + i * row_step).
template <int kBoxes>
__device__ __forceinline__ void store_boxes(const CUtensorMap& map, uint32_t from, uint32_t box_bytes, int column,
                                            int column_step, int row, int row_step, int lane) {
  fence_async_proxy();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < kBoxes; ++i)
      tma_store(&map, from + i * box_bytes, column + i * column_step, row + i * row_step);
    tma_store_commit();
  }
}
__device__ __forceinline__ void store_box(const CUtensorMap& map, uint32_t from, int column, int row, int lane) {
  store_boxes<1>(map, from, 0, column, 0, row, 0, lane);
}
// Waits until at most kLeft of the warp's stores have yet to read their boxes.
template <int kLeft>
__device__ __forceinline__ void wait_for_box(int lane) {
  if (lane == 0) tma_store_wait_read<kLeft>();
  __syncwarp();
}
// For maps among a kernel's parameters, at its start: a copy without a cached descriptor has to load that first.
template <typename... Maps>
__device__ __forceinline__ void prefetch_tensor_maps(const Maps&... maps) {
  (..., [](const CUtensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }(maps));
}

// The offset of a 16-byte chunk in a box with rows of 128 bytes. TMA stores chunk c of row r at c ^ (r mod 8), so that
// the chunks of a column lie in different banks.
__device__ __forceinline__ uint32_t swizzle_128b(int row, int chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

}  // namespace embert::sm90
