// Launches our GEMMs with the kernel and the tile that heuristics.h selects.

#include <algorithm>

#include "gemm/kernels/cooperative.cuh"
#include "gemm/kernels/pingpong.cuh"
#include "gemm/kernels/sm90.h"
#include "gemm/kernels/sm90_launch.cuh"
#include "gemm/kernels/small_m.cuh"

namespace embert::sm90 {
// The corresponding kernel names of heuristics.cpp.
static_assert(Cooperative256::kRows == 128 && Cooperative256::kColumns == 256 && Cooperative256::kNarrows,
              "kCooperative256");
static_assert(Cooperative128::kRows == 128 && Cooperative128::kColumns == 128 && !Cooperative128::kNarrows,
              "kCooperative128");
static_assert(Cooperative192x128::kRows == 192 && Cooperative192x128::kColumns == 128 && !Cooperative192x128::kNarrows,
              "kCooperative192x128");
static_assert(PingPongShape::kRows == 128 && PingPongShape::kColumns == 128, "kPingPong, kShared");

GemmArguments LinearSm90::arguments_of(const Call& call, int tile_columns) const {
  const bool has_residual = call.residual.data != nullptr;
  const uint32_t tiles_across = tile_columns == 0 ? 1 : tiles_of(w_rows_, tile_columns);
  // Rows without a LayerNorm are used unchanged: those of pre-norm models have row statistics, but for another GEMM.
  const bool is_normed =
      has_residual ? weights_.residual_norm.gamma != nullptr && !weights_.rms : weights_.input_norm.gamma != nullptr;
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

GemmOperands LinearSm90::operands_of(const Call& call) const {
  return {"hopper gemm", call.x.data, weights_.weight, 64, weights_.n};
}

template <typename T, typename Shape, bool kResidual, bool kPrescaledRows>
Status LinearSm90::run_cooperative(const Call& call) {
  call.y_splits = 1;
  return launch_cooperative<Shape, kResidual>(owner_, cooperative_kernel<T, Shape, kResidual, kPrescaledRows>,
                                              operands_of(call), arguments_of(call, Shape::kColumns), call.stream);
}

template <typename T, typename Shape, bool kPrescaledRows>
Status LinearSm90::run_small_m(const Call& call, int tile_rows) {
  call.y_splits = kStatColumns / Shape::kColumns;
  const auto run = [&](auto kernel) {
    return launch_small_m<Shape>(owner_, kernel, tile_rows, operands_of(call), arguments_of(call), call.stream);
  };
  if (call.residual.data != nullptr) return run(small_m_kernel<T, Shape, Activation::kNone, true, kPrescaledRows>);
  return with_activation(weights_.activation, [&](auto activation) {
    return run(small_m_kernel<T, Shape, decltype(activation)::value, false, kPrescaledRows>);
  });
}

template <typename T, bool kPrescaledRows>
Status LinearSm90::run_plain(const Call& call, GemmKernel kernel) {
  return with_activation(weights_.activation, [&](auto activation) {
    constexpr Activation kActivation = decltype(activation)::value;
    // Prescaled rows imply a LayerNorm, of too few columns for this kernel. Activations follow products of up to 2 048
    // columns, for which ping-pong is as fast (heuristics.cpp).
    if constexpr (!kPrescaledRows && kActivation == Activation::kNone) {
      if (kernel == GemmKernel::kCooperative256) return run_cooperative<T, Cooperative256, false, false>(call);
    }
    return launch_pingpong<PingPongShape>(owner_,
                                          kernel == GemmKernel::kShared
                                              ? pingpong_kernel<T, kActivation, false, kPrescaledRows>
                                              : pingpong_kernel<T, kActivation, true, kPrescaledRows>,
                                          operands_of(call), arguments_of(call, PingPongShape::kColumns), call.stream);
  });
}

template <typename T, bool kPrescaledRows>
Status LinearSm90::run_residual(const Call& call, GemmKernel kernel) {
  if (kernel == GemmKernel::kCooperative256) return run_cooperative<T, Cooperative256, true, kPrescaledRows>(call);
  if (kernel == GemmKernel::kCooperative128) return run_cooperative<T, Cooperative128, true, kPrescaledRows>(call);
  return run_cooperative<T, Cooperative192x128, true, kPrescaledRows>(call);
}

template <typename T, bool kPrescaledRows>
Status LinearSm90::run_tiled(const Call& call) {
  const bool has_residual = call.residual.data != nullptr;
  const bool has_rope = rope_.table != nullptr;
  const GemmConfig tile =
      choose_config({call.m, w_rows_, weights_.k, has_residual, has_rope || weights_.gated}, owner_.num_sms());
  if (has_rope) return run_rope<T, kPrescaledRows>(call, tile);
  if (weights_.gated) return run_gated<T, kPrescaledRows>(call, tile);
  if (tile.kernel == GemmKernel::kSmallM) {
    return tile.columns == 64 ? run_small_m<T, SmallM64, kPrescaledRows>(call, tile.rows)
                              : run_small_m<T, SmallM32, kPrescaledRows>(call, tile.rows);
  }
  return has_residual ? run_residual<T, kPrescaledRows>(call, tile.kernel)
                      : run_plain<T, kPrescaledRows>(call, tile.kernel);
}

Status LinearSm90::run(const RowView& x, const RowView& residual, int rows, void* y, float2* y_stats, int& y_splits,
                       const Stream& stream) {
  if (rows == 0) return {};
  EMBERT_TRY(check_operands(x, residual, y, y_stats));
  const bool has_residual = residual.data != nullptr;
  if (has_residual && weights_.activation != Activation::kNone)
    return Status::refused("hopper gemm: a residual and an activation");
  if (has_residual && rope_.table != nullptr) return Status::refused("hopper gemm: RoPE columns and a residual");
  if (!has_residual && y_stats != nullptr) return Status::refused("hopper gemm: sums come with a residual only");
  // A GEMM without any norm uses its rows unchanged, and without μ prescaled rows need no other term.
  const bool in_rows =
      weights_.prescaled_rows && (has_residual || (weights_.input_norm.gamma != nullptr && !weights_.rms));
  const Call call{x, residual, rows, y, y_stats, y_splits, stream};
  return with_half_dtype(owner_.dtype(), [&](auto type) {
    using T = decltype(type);
    return in_rows ? run_tiled<T, true>(call) : run_tiled<T, false>(call);
  });
}

}  // namespace embert::sm90
