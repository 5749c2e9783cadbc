// The tile scheduler of the kernels for many rows. Blocks are persistent: each takes tiles until none remains.
#pragma once

#include <cstdint>

#include "common/barrier.cuh"
#include "gemm/epilogue/arguments.cuh"
#include "gemm/heuristics.h"

namespace embert::sm90 {

// A block's tiles are first, first + stride, … before end. Columns run fastest, so that concurrent blocks share rows
// of x, and W stays in the L2 cache. A multiplication finds a tile's row: a division takes measurable time.
template <typename Shape>
struct TileScheduler {
  int columns, rows;         // of y, in tiles of a cluster
  uint32_t columns_inverse;  // GemmArguments::columns_inverse
  int first, stride, end;
  int rank;  // of the block in its cluster
  bool backwards;

  __device__ __forceinline__ explicit TileScheduler(const GemmArguments& args, int /* all are whole */ = 0)
      : columns_inverse(args.columns_inverse), backwards(args.backwards) {
    rank = cluster_rank();
    columns = (args.n + Shape::kColumns - 1) / Shape::kColumns;
    rows = (args.m + Shape::kRows * kCluster - 1) / (Shape::kRows * kCluster);
    first = blockIdx.x / kCluster;
    stride = gridDim.x / kCluster;
    end = columns * rows;
  }
  __device__ __forceinline__ int row_of(int tile) const {
    const int tile_row = backwards ? rows - 1 - row_tile(tile) : row_tile(tile);
    return (tile_row * kCluster + rank) * Shape::kRows;
  }
  __device__ __forceinline__ int column_of(int tile) const {
    return (tile - row_tile(tile) * columns) * Shape::kColumns;
  }
  __device__ __forceinline__ int y_column_of(int tile) const { return column_of(tile); }  // W's rows are y's columns
  __device__ __forceinline__ static constexpr int columns_of(int /* any tile */) { return Shape::kColumns; }
  __device__ __forceinline__ int row_tile(int tile) const { return __umulhi(2 * tile, columns_inverse); }
};

}  // namespace embert::sm90
