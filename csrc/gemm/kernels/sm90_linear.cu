// Launches our GEMMs with the kernel and the tile that heuristics.h selects.

#include <algorithm>
#include <type_traits>

#include "gemm/kernels/cooperative.cuh"
#include "gemm/kernels/pingpong.cuh"
#include "gemm/kernels/sm90.h"
#include "gemm/kernels/sm90_launch.cuh"
#include "gemm/kernels/small_m.cuh"

namespace embert::sm90 {
namespace {

// Many rows: as many stages as fit.
using Cooperative256 = CooperativeShape<256, 4>;
using Cooperative128 = CooperativeShape<128, 6>;
using Cooperative192x128 = CooperativeShape<128, 4, 3>;

// The corresponding kernel names of heuristics.cpp.
static_assert(Cooperative256::kRows == 128 && Cooperative256::kColumns == 256 && Cooperative256::kNarrows,
              "kCooperative256");
static_assert(Cooperative128::kRows == 128 && Cooperative128::kColumns == 128 && !Cooperative128::kNarrows,
              "kCooperative128");
static_assert(Cooperative192x128::kRows == 192 && Cooperative192x128::kColumns == 128 && !Cooperative192x128::kNarrows,
              "kCooperative192x128");
static_assert(PingPongShape::kRows == 128 && PingPongShape::kColumns == 128, "kPingPong, kShared");

}  // namespace

GemmArguments LinearSm90::arguments_of(const Call& call, int tile_columns) const {
  const bool has_residual = call.residual.data != nullptr;
  const uint32_t tiles_across = tile_columns == 0 ? 1 : tiles_of(w_rows_, tile_columns);
  // Rows without a LayerNorm are used unchanged: those of pre-norm models have row statistics, but for another GEMM.
  const bool is_normed = (has_residual ? weights_.residual_norm : weights_.input_norm).gamma != nullptr;
  const RowView normed = is_normed ? (has_residual ? call.residual : call.x) : RowView{};
  const int width = has_residual ? weights_.n : weights_.k;
  return {
      has_residual ? residual_columns() : plain_columns(),
      call.residual.data,
      next_gamma(),
      call.y,
      normed.stats,
      call.y_stats,
      normed.splits,
      kStatColumns / std::max(normed.splits, 1),
      width,
      1.0f / float(width),
      weights_.epsilon,
      call.m,
      w_rows_,
      weights_.k,
      static_cast<const uint8_t*>(weights_.prefetch_weights),
      call.m <= kPrefetchRows ? int(weights_.prefetch_bytes / 128) : 0,
      call.stream.backwards,
      ((1u << 31) + tiles_across - 1) / tiles_across,
      weights_.rms ? 0.0f : 1.0f / float(width),
  };
}

Status LinearSm90::map_operands(const Call& call, int x_rows, int w_rows, int boxes, const CUtensorMap*& x_map,
                                const CUtensorMap*& w_map) {
  EMBERT_TRY(owner_.map({call.x.data, call.m, weights_.k, x_rows, 64, boxes}, x_map));
  return owner_.map({weights_.weight, w_rows_, weights_.k, w_rows, 64, boxes}, w_map);
}

cudaLaunchConfig_t LinearSm90::configure(const Call& call, int shared_bytes,
                                         cudaLaunchAttribute (&attributes)[2]) const {
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = call.stream.dependent_launch ? 1 : 0;
  cudaLaunchConfig_t config{};
  config.dynamicSmemBytes = shared_bytes;
  config.stream = call.stream.handle;
  config.attrs = attributes;
  config.numAttrs = 1;
  return config;
}

template <typename T, typename Shape, Activation kActivation, bool kResidual, bool kPrescaledRows>
Status LinearSm90::run_cooperative(const Call& call) {
  const auto kernel = cooperative_kernel<T, Shape, kActivation, kResidual, kPrescaledRows>;
  EMBERT_TRY(owner_.allow_shared_memory(reinterpret_cast<const void*>(kernel), Shape::kSharedBytes));
  const CUtensorMap *x_map = nullptr, *w_map = nullptr, *y_map = nullptr;
  EMBERT_TRY(map_operands(call, Shape::kRows, Shape::kWShare, 0, x_map, w_map));
  EMBERT_TRY(owner_.map({call.y, call.m, weights_.n, 16, 64}, y_map));  // a warp's rows
  const CUtensorMap *residual_map = y_map, *narrow_w_map = w_map;
  if (kResidual) EMBERT_TRY(owner_.map({call.residual.data, call.m, weights_.n, Shape::kRows, 64}, residual_map));
  const int tile_rows = tiles_of(call.m, Shape::kRows * kCluster);
  const int across = tiles_of(weights_.n, Shape::kColumns);
  int full_rows = tile_rows;
  if constexpr (kResidual && Shape::kNarrows) {
    full_rows = narrowing_of(tile_rows, across, owner_.clusters()).full_rows;
    EMBERT_TRY(owner_.map({weights_.weight, weights_.n, weights_.k, Shape::kWShare / 2, 64}, narrow_w_map));
  }
  const int tiles = (2 * tile_rows - full_rows) * across;
  call.y_splits = 1;
  cudaLaunchAttribute attributes[2]{};
  const cudaLaunchConfig_t config = configure_many<Shape>(call, tiles, attributes);
  return launch_status(cudaLaunchKernelEx(&config, kernel, *x_map, *w_map, *narrow_w_map, *residual_map, *y_map,
                                          arguments_of(call, Shape::kColumns), full_rows),
                       call.m);
}

Status LinearSm90::launch_status(cudaError_t code, int rows) const {
  if (code == cudaSuccess) return {};
  return Status::cuda(code, ("hopper gemm (" + std::to_string(rows) + " rows, " + std::to_string(weights_.k) + " to " +
                             std::to_string(weights_.n) + ")")
                                .c_str());
}

template <typename T, typename Shape, bool kPrescaledRows>
Status LinearSm90::run_small_m(const Call& call) {
  if (call.residual.data != nullptr)
    return launch_small_m<Shape>(call, small_m_kernel<T, Shape, Activation::kNone, true, kPrescaledRows>);
  return with_activation(weights_.activation, [&](auto activation) {
    return launch_small_m<Shape>(call, small_m_kernel<T, Shape, decltype(activation)::value, false, kPrescaledRows>);
  });
}

template <typename T, bool kPrescaledRows>
Status LinearSm90::run_plain(const Call& call, GemmKernel kernel) {
  return with_activation(weights_.activation, [&](auto activation) {
    constexpr Activation kActivation = decltype(activation)::value;
    if (kernel == GemmKernel::kShared)
      return launch_pingpong(call, pingpong_kernel<T, kActivation, false, kPrescaledRows>);
    if constexpr (!kPrescaledRows) {  // prescaled rows imply a LayerNorm, of too few columns for this kernel
      if (kernel == GemmKernel::kCooperative256)
        return run_cooperative<T, Cooperative256, kActivation, false, false>(call);
    }
    return launch_pingpong(call, pingpong_kernel<T, kActivation, true, kPrescaledRows>);
  });
}

template <typename T, bool kPrescaledRows>
Status LinearSm90::run_residual(const Call& call, GemmKernel kernel) {
  if (kernel == GemmKernel::kCooperative256)
    return run_cooperative<T, Cooperative256, Activation::kNone, true, kPrescaledRows>(call);
  if (kernel == GemmKernel::kCooperative128)
    return run_cooperative<T, Cooperative128, Activation::kNone, true, kPrescaledRows>(call);
  return run_cooperative<T, Cooperative192x128, Activation::kNone, true, kPrescaledRows>(call);
}

template <typename T>
Status LinearSm90::run_type(const Call& call) {
  const bool has_residual = call.residual.data != nullptr;
  if (has_residual && weights_.activation != Activation::kNone)
    return Status::refused("hopper gemm: a residual and an activation");
  if (has_residual && rope_.table != nullptr) return Status::refused("hopper gemm: RoPE columns and a residual");
  if (!has_residual && call.y_stats != nullptr) return Status::refused("hopper gemm: sums come with a residual only");
  // A GEMM without any norm uses its rows unchanged.
  const bool in_rows = weights_.prescaled_rows && (has_residual || weights_.input_norm.gamma != nullptr);
  return in_rows ? run_tiled<T, true>(call) : run_tiled<T, false>(call);
}

template <typename T, bool kPrescaledRows>
Status LinearSm90::run_tiled(const Call& call) {
  const bool has_residual = call.residual.data != nullptr;
  const bool use_pingpong = rope_.table != nullptr;
  const GemmConfig tile =
      choose_config({call.m, w_rows_, weights_.k, has_residual, use_pingpong || weights_.gated}, owner_.num_sms());
  Call tiled = call;
  tiled.tile_rows = tile.rows;
  if (use_pingpong) return run_rope<T, kPrescaledRows>(tiled, tile);
  if (weights_.gated) return run_gated<T, kPrescaledRows>(tiled, tile);
  if (tile.kernel == GemmKernel::kSmallM) {
    return tile.columns == 64 ? run_small_m<T, SmallM64, kPrescaledRows>(tiled)
                              : run_small_m<T, SmallM32, kPrescaledRows>(tiled);
  }
  return has_residual ? run_residual<T, kPrescaledRows>(call, tile.kernel)
                      : run_plain<T, kPrescaledRows>(call, tile.kernel);
}

Status LinearSm90::run(const RowView& x, const RowView& residual, int rows, void* y, float2* y_stats, int& y_splits,
                       const Stream& stream) {
  if (rows == 0) return {};
  EMBERT_TRY(check_operands(x, residual, y, y_stats));
  const Call call{x, residual, rows, y, y_stats, y_splits, stream};
  return owner_.dtype() == DType::kFloat16 ? run_type<half_t>(call) : run_type<bfloat_t>(call);
}

}  // namespace embert::sm90
