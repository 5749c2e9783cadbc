// Launches our products in the kernel and the tile that heuristics.h names.

#include <algorithm>
#include <type_traits>

#include "gemm/epilogue/store.cuh"
#include "gemm/kernels/cooperative.cuh"
#include "gemm/kernels/sm90.h"
#include "gemm/kernels/sm90_launch.cuh"
#include "gemm/kernels/small_m.cuh"

namespace embert::hopper {
namespace {

// Many rows: as many stages as fit.
using Wide256 = WideShape<256, 4>;
using Wide128 = WideShape<128, 6>;
using Tall128 = WideShape<128, 4, 3>;

// What heuristics.cpp takes them for.
static_assert(Wide256::kRows == 128 && Wide256::kColumns == 256 && Wide256::kNarrows, "kWide256");
static_assert(Wide128::kRows == 128 && Wide128::kColumns == 128 && !Wide128::kNarrows, "kWide128");
static_assert(Tall128::kRows == 192 && Tall128::kColumns == 128 && !Tall128::kNarrows, "kTall128");
static_assert(PingPongShape::kRows == 128 && PingPongShape::kColumns == 128, "kPingPong, kShared");

}  // namespace

GemmArguments HopperLinear::arguments_of(const Call& call, int tile_columns) const {
  const bool adds = call.residual.data != nullptr;
  const uint32_t tiles_across = tile_columns == 0 ? 1 : tiles_of(w_rows_, tile_columns);
  // Rows without a LayerNorm are taken as they are: those of pre-norm models have sums, but for another product.
  const bool is_normed = (adds ? weights_.residual_norm : weights_.input_norm).gamma != nullptr;
  const Rows normed = is_normed ? (adds ? call.residual : call.x) : Rows{};
  const int width = adds ? weights_.out : weights_.in;
  return {
      adds ? residual_columns() : plain_columns(),
      call.residual.data,
      next_gamma(),
      call.y,
      normed.sums,
      call.y_sums,
      normed.parts,
      kSumColumns / std::max(normed.parts, 1),
      width,
      1.0f / float(width),
      weights_.epsilon,
      call.rows,
      w_rows_,
      weights_.in,
      static_cast<const uint8_t*>(weights_.ahead),
      call.rows <= kAheadRows ? int(weights_.ahead_bytes / 128) : 0,
      call.stream.backwards,
      ((1u << 31) + tiles_across - 1) / tiles_across,
  };
}

Status HopperLinear::map_operands(const Call& call, int x_rows, int w_rows, int boxes, const CUtensorMap*& x_map,
                                  const CUtensorMap*& w_map) {
  EMBERT_TRY(owner_.map({call.x.data, call.rows, weights_.in, x_rows, 64, boxes}, x_map));
  return owner_.map({weights_.weight, w_rows_, weights_.in, w_rows, 64, boxes}, w_map);
}

cudaLaunchConfig_t HopperLinear::configure(const Call& call, int shared_bytes,
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

template <typename T, typename Shape, Activation kActivation, bool kResidual, bool kGammaInRows>
Status HopperLinear::run_wide(const Call& call) {
  const auto kernel = wide_kernel<T, Shape, kActivation, kResidual, kGammaInRows>;
  EMBERT_TRY(owner_.allow_shared_memory(reinterpret_cast<const void*>(kernel), Shape::kSharedBytes));
  const CUtensorMap *x_map = nullptr, *w_map = nullptr, *y_map = nullptr;
  EMBERT_TRY(map_operands(call, Shape::kRows, Shape::kWShare, 0, x_map, w_map));
  EMBERT_TRY(owner_.map({call.y, call.rows, weights_.out, 16, 64}, y_map));  // a warp's rows
  const CUtensorMap *residual_map = y_map, *narrow_w_map = w_map;
  if (kResidual) EMBERT_TRY(owner_.map({call.residual.data, call.rows, weights_.out, Shape::kRows, 64}, residual_map));
  const int tile_rows = tiles_of(call.rows, Shape::kRows * kCluster);
  const int across = tiles_of(weights_.out, Shape::kColumns);
  int whole_rows = tile_rows;
  if constexpr (kResidual && Shape::kNarrows) {
    whole_rows = narrowing_of(tile_rows, across, owner_.clusters()).whole_rows;
    EMBERT_TRY(owner_.map({weights_.weight, weights_.out, weights_.in, Shape::kWShare / 2, 64}, narrow_w_map));
  }
  const int tiles = (2 * tile_rows - whole_rows) * across;
  call.y_parts = 1;
  cudaLaunchAttribute attributes[2]{};
  const cudaLaunchConfig_t config = configure_many<Shape>(call, tiles, attributes);
  return said(cudaLaunchKernelEx(&config, kernel, *x_map, *w_map, *narrow_w_map, *residual_map, *y_map,
                                 arguments_of(call, Shape::kColumns), whole_rows),
              call.rows);
}

Status HopperLinear::said(cudaError_t code, int rows) const {
  if (code == cudaSuccess) return {};
  return Status::cuda(code, ("hopper gemm (" + std::to_string(rows) + " rows, " + std::to_string(weights_.in) + " to " +
                             std::to_string(weights_.out) + ")")
                                .c_str());
}

template <typename T, typename Shape, bool kGammaInRows>
Status HopperLinear::run_few(const Call& call) {
  if (call.residual.data != nullptr)
    return launch_few<Shape>(call, few_rows_kernel<T, Shape, Activation::kNone, true, kGammaInRows>);
  return with_activation(weights_.activation, [&](auto activation) {
    return launch_few<Shape>(call, few_rows_kernel<T, Shape, decltype(activation)::value, false, kGammaInRows>);
  });
}

template <typename T, bool kGammaInRows>
Status HopperLinear::run_plain(const Call& call, TileKernel kernel) {
  return with_activation(weights_.activation, [&](auto activation) {
    constexpr Activation kActivation = decltype(activation)::value;
    if (kernel == TileKernel::kShared)
      return launch_pingpong(call, pingpong_kernel<T, kActivation, false, kGammaInRows>);
    if constexpr (!kGammaInRows) {  // gamma in the rows means a LayerNorm, of too few columns for this kernel
      if (kernel == TileKernel::kWide256) return run_wide<T, Wide256, kActivation, false, false>(call);
    }
    return launch_pingpong(call, pingpong_kernel<T, kActivation, true, kGammaInRows>);
  });
}

template <typename T, bool kGammaInRows>
Status HopperLinear::run_residual(const Call& call, TileKernel kernel) {
  if (kernel == TileKernel::kWide256) return run_wide<T, Wide256, Activation::kNone, true, kGammaInRows>(call);
  if (kernel == TileKernel::kWide128) return run_wide<T, Wide128, Activation::kNone, true, kGammaInRows>(call);
  return run_wide<T, Tall128, Activation::kNone, true, kGammaInRows>(call);
}

template <typename T>
Status HopperLinear::run_type(const Call& call) {
  const bool adds = call.residual.data != nullptr;
  if (adds && weights_.activation != Activation::kNone)
    return Status::refused("hopper gemm: a residual and an activation");
  if (adds && rotary_.table != nullptr) return Status::refused("hopper gemm: turned columns and a residual");
  if (!adds && call.y_sums != nullptr) return Status::refused("hopper gemm: sums come with a residual only");
  // A product without any norm takes its rows as they are.
  const bool in_rows = weights_.gamma_in_rows && (adds || weights_.input_norm.gamma != nullptr);
  return in_rows ? run_tiled<T, true>(call) : run_tiled<T, false>(call);
}

template <typename T, bool kGammaInRows>
Status HopperLinear::run_tiled(const Call& call) {
  const bool adds = call.residual.data != nullptr;
  const bool turns = rotary_.table != nullptr;
  const TileChoice tile =
      choose_tile({call.rows, w_rows_, weights_.in, adds, turns || weights_.gated}, owner_.processors());
  Call tiled = call;
  tiled.tile_rows = tile.rows;
  if (turns) return run_rotary<T, kGammaInRows>(tiled, tile);
  if (weights_.gated) return run_gated<T, kGammaInRows>(tiled, tile);
  if (tile.kernel == TileKernel::kFewRows) {
    return tile.columns == 64 ? run_few<T, FewMiddle, kGammaInRows>(tiled) : run_few<T, FewNarrow, kGammaInRows>(tiled);
  }
  return adds ? run_residual<T, kGammaInRows>(call, tile.kernel) : run_plain<T, kGammaInRows>(call, tile.kernel);
}

Status HopperLinear::run(const Rows& x, const Rows& residual, int rows, void* y, float2* y_sums, int& y_parts,
                         const Stream& stream) {
  if (rows == 0) return {};
  EMBERT_TRY(check_places(x, residual, y, y_sums));
  const Call call{x, residual, rows, y, y_sums, y_parts, stream};
  return owner_.dtype() == DType::kFloat16 ? run_type<half_t>(call) : run_type<bfloat_t>(call);
}

}  // namespace embert::hopper
