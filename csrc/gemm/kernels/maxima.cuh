// maxima[text, column] on Hopper: the ping-pong main loop with an epilogue that stores no product
// (epilogue/maxima.cuh). A decoder has many more columns than a layer's GEMMs, 30 522 or 250 002, so W does not stay in
// the L2 cache, and tiles come in bands.
#pragma once

#include "common/shared_memory.cuh"
#include "common/trap.cuh"
#include "gemm/epilogue/maxima.cuh"
#include "gemm/mainloop/pingpong.cuh"

namespace embert::sm90 {

// The banded tile scheduler: bands of columns, one after another. A band iterates over all rows, and for each over all
// of its columns. So W is read from memory once, x once a band, and all other reads hit the L2 cache. A tile takes
// thousands of cycles, so the cost of its divisions does not matter.
template <typename Shape>
struct BandedTileScheduler {
  int rows, columns, band;  // in tiles of a cluster
  int first_row;            // of x
  int first, stride, end;
  int rank;  // of the block in its cluster

  __device__ __forceinline__ explicit BandedTileScheduler(const MaximaArguments& args)
      : band(args.band), first_row(args.first_row) {
    rank = cluster_rank();
    columns = (args.out + Shape::kColumns - 1) / Shape::kColumns;
    rows = (args.end_row - args.first_row + Shape::kRows * kCluster - 1) / (Shape::kRows * kCluster);
    first = blockIdx.x / kCluster;
    stride = gridDim.x / kCluster;
    end = columns * rows;
  }
  __device__ __forceinline__ int row_of(int tile) const {
    return first_row + (place_of(tile).row * kCluster + rank) * Shape::kRows;
  }
  __device__ __forceinline__ int column_of(int tile) const { return place_of(tile).column * Shape::kColumns; }
  __device__ __forceinline__ static constexpr int columns_of(int /* any tile */) { return Shape::kColumns; }

 private:
  struct Position {
    int row, column;  // in tiles
  };
  __device__ __forceinline__ Position place_of(int tile) const {
    const int before = uint32_t(tile) / uint32_t(rows * band) * band;  // columns of earlier bands
    const uint32_t width = min(band, columns - before), in_band = tile - before * rows;
    return {int(in_band / width), before + int(in_band % width)};
  }
};

// The epilogue of a consumer (pingpong.cuh).
struct MaximaEpilogue
    : MaximaEpilogueBase<PingPongShape, BandedTileScheduler<PingPongShape>, PingPongShape::kConsumerRows<true> / 64>,
      PlainMainloop {
  using MaximaEpilogueBase::MaximaEpilogueBase;
};

template <typename T>
__global__ void __launch_bounds__(PingPongShape::kThreads, 1)
    maxima_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                  const MaximaArguments args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = PingPongShape;
  using Scheduler = BandedTileScheduler<Shape>;
  static_assert(Shape::kColumns == kMaximaColumns, "maxima have whole tiles");
  extern __shared__ __align__(1024) uint8_t raw[];  // a swizzle pattern is 1 024 bytes
  if (threadIdx.x == 32) prefetch_tensor_maps(x_map, w_map);
  init_pingpong<true>(shared_address(raw));
  const Scheduler tiles(args);
  pingpong_mainloop<T, true>(shared_address(raw), tiles, args.in, x_map, w_map,
                             [&](int, int own_row) { return MaximaEpilogue(args, tiles, own_row); });
#else
  EMBERT_TRAP("maxima_kernel");
#endif
}

}  // namespace embert::sm90
