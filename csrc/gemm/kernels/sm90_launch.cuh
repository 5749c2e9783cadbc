// Launches the small M and the ping-pong kernels, with any epilogue.
#pragma once

#include <algorithm>

#include "gemm/epilogue/store.cuh"
#include "gemm/kernels/sm90.h"
#include "gemm/kernels/small_m.cuh"

namespace embert::sm90 {

// Small M: more and smaller tiles.
using SmallM64 = SmallMShape<64>;
using SmallM32 = SmallMShape<32>;

// One block for each multiprocessor, in clusters, or fewer with fewer tiles.
template <typename Shape>
cudaLaunchConfig_t LinearSm90::configure_many(const Call& call, int tiles, cudaLaunchAttribute (&attributes)[2]) const {
  cudaLaunchConfig_t config = configure(call, Shape::kSharedBytes, attributes);
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {kCluster, 1, 1};
  config.numAttrs = 2;
  config.gridDim = dim3(std::min(tiles, owner_.clusters()) * kCluster);
  config.blockDim = dim3(Shape::kThreads);
  return config;
}

// `more`: the kernel's arguments after those that all kernels of its kind have.
template <typename Kernel, typename... More>
Status LinearSm90::launch_pingpong(const Call& call, Kernel kernel, const More&... more) {
  EMBERT_TRY(owner_.allow_shared_memory(reinterpret_cast<const void*>(kernel), PingPongShape::kSharedBytes));
  const CUtensorMap *x_map = nullptr, *w_map = nullptr, *y_map = nullptr;
  EMBERT_TRY(map_operands(call, PingPongShape::kRows, PingPongShape::kWShare, 0, x_map, w_map));
  EMBERT_TRY(owner_.map({call.y, call.m, weights_.n, 16, 64}, y_map));  // a warp's rows
  const int tiles = tiles_of(call.m, PingPongShape::kRows * kCluster) * tiles_of(w_rows_, PingPongShape::kColumns);
  cudaLaunchAttribute attributes[2]{};
  const cudaLaunchConfig_t config = configure_many<PingPongShape>(call, tiles, attributes);
  return launch_status(
      cudaLaunchKernelEx(&config, kernel, *x_map, *w_map, *y_map, arguments_of(call, PingPongShape::kColumns), more...),
      call.m);
}

template <typename Shape, typename Kernel, typename... More>
Status LinearSm90::launch_small_m(const Call& call, Kernel kernel, const More&... more) {
  const int x_rows = std::min(call.tile_rows, tiles_of(call.m, 8) * 8);  // whole swizzle patterns
  const dim3 grid(tiles_of(w_rows_, Shape::kColumns), tiles_of(call.m, x_rows));
  const int stages = small_m_stages<Shape>(call.m, x_rows, tiles_of(weights_.k, Shape::kBoxes * 64),
                                           int(grid.x * grid.y), owner_.num_sms());
  EMBERT_TRY(owner_.allow_shared_memory(reinterpret_cast<const void*>(kernel), kSmallMMaxBytes));
  const CUtensorMap *x_map = nullptr, *w_map = nullptr;
  EMBERT_TRY(map_operands(call, x_rows, Shape::kColumns, Shape::kBoxes, x_map, w_map));
  call.y_splits = kStatColumns / Shape::kColumns;
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config = configure(call, Shape::shared_bytes(stages, x_rows), attributes);
  config.gridDim = grid;
  config.blockDim = dim3(kSmallMThreads);
  return launch_status(cudaLaunchKernelEx(&config, kernel, *x_map, *w_map, arguments_of(call), x_rows, stages, more...),
                       call.m);
}

}  // namespace embert::sm90
