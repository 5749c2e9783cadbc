// Launches GEMM kernels, with any epilogue, for operands of 16 bits and for int8.
#pragma once

#include <algorithm>

#include "gemm/kernels/sm90.h"
#include "gemm/kernels/small_m.cuh"

namespace embert::sm90 {

// The operands of a launch in addition to GemmArguments.
struct GemmOperands {
  const char* name;  // for errors
  const void *x, *w;
  int box_columns;         // of x and W: columns of K in 128 bytes
  int y_columns;           // with gates half of W's rows
  int y_box_columns = 64;  // columns of y in 128 bytes
};

// A block for each multiprocessor, in clusters, or fewer with fewer tiles.
template <typename Shape, typename Kernel, typename... Arguments>
Status launch_persistent(const char* name, GemmSm90& owner, Kernel kernel, int tiles, const Stream& stream,
                         const Arguments&... arguments) {
  EMBERT_TRY(owner.allow_shared_memory(reinterpret_cast<const void*>(kernel), Shape::kSharedBytes));
  return launch_clusters(name, kernel, kCluster, std::min(tiles, owner.clusters()) * kCluster, Shape::kThreads,
                         Shape::kSharedBytes, stream, arguments...);
}

// `more`: the kernel's arguments after those that all kernels of its kind have.
template <typename Shape, typename Kernel, typename... More>
Status launch_pingpong(GemmSm90& owner, Kernel kernel, const GemmOperands& operands, const GemmArguments& args,
                       const Stream& stream, const More&... more) {
  const CUtensorMap *x_map = nullptr, *w_map = nullptr, *y_map = nullptr;
  EMBERT_TRY(owner.map({operands.x, args.m, args.k, Shape::kRows, operands.box_columns}, x_map));
  EMBERT_TRY(owner.map({operands.w, args.n, args.k, Shape::kWShare, operands.box_columns}, w_map));
  EMBERT_TRY(owner.map({args.y, args.m, operands.y_columns, 16, operands.y_box_columns}, y_map));  // a warp's rows
  const int tiles = tiles_of(args.m, Shape::kRows * kCluster) * tiles_of(args.n, Shape::kColumns);
  return launch_persistent<Shape>(operands.name, owner, kernel, tiles, stream, *x_map, *w_map, *y_map, args, more...);
}

template <typename Shape, bool kResidual, typename Kernel, typename... More>
Status launch_cooperative(GemmSm90& owner, Kernel kernel, const GemmOperands& operands, const GemmArguments& args,
                          const Stream& stream, const More&... more) {
  const CUtensorMap *x_map = nullptr, *w_map = nullptr, *y_map = nullptr;
  EMBERT_TRY(owner.map({operands.x, args.m, args.k, Shape::kRows, operands.box_columns}, x_map));
  EMBERT_TRY(owner.map({operands.w, args.n, args.k, Shape::kWShare, operands.box_columns}, w_map));
  EMBERT_TRY(owner.map({args.y, args.m, args.n, 16, 64}, y_map));  // a warp's rows
  const CUtensorMap *residual_map = y_map, *narrow_w_map = w_map;
  if (kResidual) EMBERT_TRY(owner.map({args.residual, args.m, args.n, Shape::kRows, 64}, residual_map));
  const int tile_rows = tiles_of(args.m, Shape::kRows * kCluster), across = tiles_of(args.n, Shape::kColumns);
  int full_rows = tile_rows;
  if constexpr (kResidual && Shape::kNarrows) {
    full_rows = narrowing_of(tile_rows, across, owner.clusters()).full_rows;
    EMBERT_TRY(owner.map({operands.w, args.n, args.k, Shape::kWShare / 2, operands.box_columns}, narrow_w_map));
  }
  return launch_persistent<Shape>(operands.name, owner, kernel, (2 * tile_rows - full_rows) * across, stream, *x_map,
                                  *w_map, *narrow_w_map, *residual_map, *y_map, args, full_rows, more...);
}

// `tile_rows`: of the configuration.
template <typename Shape, typename Kernel, typename... More>
Status launch_small_m(GemmSm90& owner, Kernel kernel, int tile_rows, const GemmOperands& operands,
                      const GemmArguments& args, const Stream& stream, const More&... more) {
  const int x_rows = std::min(tile_rows, tiles_of(args.m, 8) * 8);  // whole swizzle patterns
  const dim3 grid(tiles_of(args.n, Shape::kColumns), tiles_of(args.m, x_rows));
  const int stages = small_m_stages<Shape>(args.m, x_rows, tiles_of(args.k, Shape::kBoxes * operands.box_columns),
                                           int(grid.x * grid.y), owner.num_sms());
  EMBERT_TRY(owner.allow_shared_memory(reinterpret_cast<const void*>(kernel), kSmallMMaxBytes));
  const CUtensorMap *x_map = nullptr, *w_map = nullptr;
  EMBERT_TRY(owner.map({operands.x, args.m, args.k, x_rows, operands.box_columns, Shape::kBoxes}, x_map));
  EMBERT_TRY(owner.map({operands.w, args.n, args.k, Shape::kColumns, operands.box_columns, Shape::kBoxes}, w_map));
  return launch(operands.name, kernel, grid, kSmallMThreads, Shape::shared_bytes(stages, x_rows), stream, *x_map,
                *w_map, args, x_rows, stages, more...);
}

}  // namespace embert::sm90
