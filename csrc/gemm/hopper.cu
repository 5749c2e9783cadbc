// Which kernel, which tile: the matrix products of hopper_few.cuh, hopper_pingpong.cuh and hopper_wide.cuh launched.

#include <algorithm>
#include <type_traits>

#include "fold.cuh"
#include "hopper_few.cuh"
#include "hopper_linear.cuh"
#include "hopper_pingpong.cuh"
#include "hopper_wide.cuh"

namespace embert {
namespace hopper {
namespace {

// All tuned numbers. Few rows: more and smaller tiles.
using Middle = FewShape<64>;
using Narrow = FewShape<32>;

// Many rows: as many stages as fit.
using Wide256 = WideShape<256, 4>;
using Wide128 = WideShape<128, 6>;
using Tall128 = WideShape<128, 4, 3>;  // 192 rows: what fits the multiprocessors in one round may not with 128 or 256

// Without a residual and up to this K, tiles of 128 × 128 in turn are the faster ones (16 384 rows, 1 536 to 4 608: 308
// µs against 326; 2 048 to 6 144: 594 against 586).
constexpr int kMostPingPongIn = 1536;

// Cycles of a launch of the wide kernel, to choose a tile by: so many for each round of tiles and 64 of K, which is the
// matrix unit at 84 to 95 %, and so many for everything else (these only relative to each other). Over 1 280 to 26 368
// rows of BERT-base's, -large's and MiniLM's O and FFN out, what is chosen so takes 0.04 % more than the best of the
// three; without Tall128 2.5 % (3 300 rows, 3 072 to 768: 29.8 µs in it, 35.1 and 36.5 in the others). Narrow tiles
// came later and were not part of that.
struct WideCost {
  int step, rest;
};
template <typename Shape>
constexpr WideCost kWideCost = {};
template <>
constexpr WideCost kWideCost<Wide256> = {1080, 6500};
template <>
constexpr WideCost kWideCost<Wide128> = {610, 5000};
template <>
constexpr WideCost kWideCost<Tall128> = {890, 6500};
// Of Wide256's narrow tiles, a step. In a round after four whole ones they took 0.55 to 0.60 of a whole one's time (768
// and 1 024 columns, K the same and four times as much). Tiles of 64 columns took 0.52 to 0.62, of 192 0.81 to 0.99.
constexpr int kNarrowStep = 630;

// Tiles of 64 × 64 up to which the kernel for few rows is the faster one: of products that widen, of those that do not.
// A forward of BERT-base at 448 rows, whose QKV has 252: 513 µs with it, 481 in ping-pong; -large at 320 (QKV 240): 1
// 100 and 1 126.
constexpr int kFewTiles[2] = {240, 160};
constexpr int kMostFewRows = 4096;  // whose sums, up to four parts a group, fit where they go (norm.h)
struct FewTile {
  int rows, columns;
};
// Measured whole layers at a time (BERT-base, -large, MiniLM; 16 to 1 024 rows; each product in each tile; H100): what
// is chosen here loses 2.5 % of a layer to the best of them. A launch should leave multiprocessors to the next one,
// whose W comes meanwhile: at 32 rows FFN out of BERT-base takes 24 blocks better than 48 (14.5 µs a layer
// against 16.6).
FewTile few_tile(int rows, int out, int in) {
  const bool widens = out > in;
  if (widens && rows <= 32) return {rows <= 16 ? 16 : 32, in >= 1024 ? 64 : 32};
  if (widens) return {64, rows <= 64 ? 32 : 64};
  if (rows <= 32) return {rows > 16 && out == 768 ? 32 : 16, 32};
  if (rows <= 96) return {32, 32};
  return {64, rows <= 128 ? 32 : 64};
}

// What a block for few rows may take of a multiprocessor's 227 KB, so that the next kernel's fit beside it.
constexpr int kFewBytes = 113 * 1024;
// The same where a launch has no more blocks than there are multiprocessors, and over 64 rows: the ring must cover the
// memory's latency.
constexpr int kAloneBytes = 227 * 1024;

// Up to so many rows a launch brings weights to the L2 cache, for the second product after it: the memory is idle then.
// BERT-base, µs a layer: 16 rows 15.4 → 14.4, 32 16.6 → 15.8, 64 18.2 → 17.4, but 128 20.8 → 21.1. MiniLM, whose
// weights stay in the cache, as before. By the rows' readers when they are done: at their start, 0.15 to 0.5 less is
// won.
constexpr int kAheadRows = 64;

// Past a model's own rounding of γ·W (2.1e-4 in FP16, 1.7e-3 in BF16) by this factor, LayerNorm is better not folded
// in.
constexpr float kFoldTolerance = 3.0f;
constexpr int kColumnPadding = 256;  // the epilogue reads whole tiles of columns

// How many rows of Wide256's tiles have whole ones, the others narrow ones, and the cycles a step that come of it.
struct Narrowing {
  int whole_rows, step;
};
// What does not fit the full rounds is narrow where it fits one round so.
Narrowing narrowing_of(int tile_rows, int across, int clusters) {
  const int tiles = tile_rows * across, rounds = tiles / clusters;
  const int narrow_rows = tiles_of(tiles % clusters, across);
  const bool fits = tiles + narrow_rows * across <= (rounds + 1) * clusters;  // they are twice as many as whole ones
  if (narrow_rows == 0 || !fits) return {tile_rows, tiles_of(tiles, clusters) * kWideCost<Wide256>.step};
  return {tile_rows - narrow_rows, rounds * kWideCost<Wide256>.step + kNarrowStep};
}

}  // namespace

Status Hopper::open() {
  EMBERT_TRY(maps_.open());
  int device = 0;
  EMBERT_CUDA(cudaGetDevice(&device));
  EMBERT_CUDA(cudaDeviceGetAttribute(&processors_, cudaDevAttrMultiProcessorCount, device));
  EMBERT_TRY(fold_error_.allocate(sizeof(float)));
  return fold_error_.zero();
}

Status Hopper::check_folds() const {
  float worst = 0.0f;
  EMBERT_CUDA(cudaMemcpy(&worst, fold_error_.as(), sizeof(worst), cudaMemcpyDeviceToHost));
  const float usual = dtype_ == DType::kFloat16 ? 2.1e-4f : 1.7e-3f;
  if (worst <= kFoldTolerance * usual) return {};
  return Status::refused("LayerNorm's gamma cannot be folded into the products: its relative error would be " +
                         std::to_string(worst) + ", at most " + std::to_string(kFoldTolerance * usual) + " is taken");
}

Status Hopper::prepare(const LinearWeights& weights, const Stream& stream, std::unique_ptr<Linear>& linear) {
  if (weights.in % 8 != 0 || weights.out % 8 != 0) return Status::refused("hopper gemm: sizes must be multiples of 8");
  if (weights.residual_norm.gamma != nullptr && weights.activation != Activation::kNone)
    return Status::refused("hopper gemm: a residual and an activation");
  if (weights.input_norm.gamma != nullptr && !weights.gamma_in_rows && weights.exact == nullptr)
    return Status::refused("hopper gemm: weights are folded from FP32 ones, which are not there");
  if (weights.input_norm.gamma != nullptr && weights.in > kMaxSumColumns)
    return Status::refused("hopper gemm: a LayerNorm of more than " + std::to_string(kMaxSumColumns) + " columns");
  // Tiles<> finds a tile's row by a multiplication that is exact up to here; 4 194 240 rows are the most there are.
  if (tiles_of(weights.out, 128) > 256)
    return Status::refused("hopper gemm: " + std::to_string(weights.out) + " columns, at most 32768 can be run");
  auto made = std::make_unique<HopperLinear>(*this, weights);
  EMBERT_TRY(made->init(stream));
  linear = std::move(made);
  return {};
}

template <typename T>
Status HopperLinear::fold(const Stream& stream) {
  const int out = weights_.out;
  T* const weight = static_cast<T*>(weights_.weight);
  const float factor = activation_factor(weights_.activation);
  if (weights_.gamma_in_rows && weights_.input_norm.gamma != nullptr) {
    EMBERT_TRY(launch("sum_input", sum_input_kernel<T>, out, kFoldThreads, 0, stream, weight, weights_.bias,
                      weights_.input_norm, weights_.in, factor, static_cast<float2*>(plain_columns()),
                      owner_.fold_error()));
  } else {
    EMBERT_TRY(launch("fold_input", fold_input_kernel<T>, out, kFoldThreads, 0, stream, weight, weights_.exact,
                      weights_.bias, weights_.input_norm, weights_.in, factor, static_cast<float*>(plain_columns()),
                      owner_.fold_error()));
  }
  const int blocks = (out + kFoldThreads - 1) / kFoldThreads;
  return launch("fold_residual", fold_residual_kernel<T>, blocks, kFoldThreads, 0, stream, weights_.bias,
                weights_.residual_norm, weights_.next_gamma, out, residual_columns(), static_cast<T*>(next_gamma()));
}

Status HopperLinear::init(const Stream& stream) {
  padded_ = (weights_.out + kColumnPadding - 1) / kColumnPadding * kColumnPadding;
  EMBERT_TRY(columns_.allocate(size_t(padded_) * (2 * sizeof(float2) + sizeof(half_t))));
  EMBERT_CUDA(cudaMemsetAsync(columns_.as(), 0, columns_.bytes(), stream.handle));
  EMBERT_TRY(owner_.dtype() == DType::kFloat16 ? fold<half_t>(stream) : fold<bfloat_t>(stream));
  weights_.exact = nullptr;  // its time is over
  return {};
}

GemmArguments HopperLinear::arguments_of(const Call& call, int tile_columns) const {
  const bool adds = call.residual.data != nullptr;
  const uint32_t tiles_across = tile_columns == 0 ? 1 : tiles_of(weights_.out, tile_columns);
  const Rows& normed = adds ? call.residual : call.x;
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
      weights_.out,
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
  return owner_.map({weights_.weight, weights_.out, weights_.in, w_rows, 64, boxes}, w_map);
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

// A block for each multiprocessor, in clusters, or as many as there are tiles.
template <typename Shape>
cudaLaunchConfig_t HopperLinear::configure_many(const Call& call, int tiles,
                                                cudaLaunchAttribute (&attributes)[2]) const {
  cudaLaunchConfig_t config = configure(call, Shape::kSharedBytes, attributes);
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {kCluster, 1, 1};
  config.numAttrs = 2;
  config.gridDim = dim3(std::min(tiles, owner_.clusters()) * kCluster);
  config.blockDim = dim3(Shape::kThreads);
  return config;
}

template <typename T, Activation kActivation, bool kTurns, bool kGammaInRows>
Status HopperLinear::run_pingpong(const Call& call) {
  const auto kernel = pingpong_kernel<T, kActivation, kTurns, kGammaInRows>;
  EMBERT_TRY(owner_.allow_shared_memory(reinterpret_cast<const void*>(kernel), PingPongShape::kSharedBytes));
  const CUtensorMap *x_map = nullptr, *w_map = nullptr, *y_map = nullptr;
  EMBERT_TRY(map_operands(call, PingPongShape::kRows, PingPongShape::kWShare, 0, x_map, w_map));
  EMBERT_TRY(owner_.map({call.y, call.rows, weights_.out, 16, 64}, y_map));  // a warp's rows
  const int tiles =
      tiles_of(call.rows, PingPongShape::kRows * kCluster) * tiles_of(weights_.out, PingPongShape::kColumns);
  cudaLaunchAttribute attributes[2]{};
  const cudaLaunchConfig_t config = configure_many<PingPongShape>(call, tiles, attributes);
  return said(cudaLaunchKernelEx(&config, kernel, *x_map, *w_map, *y_map, arguments_of(call, PingPongShape::kColumns)),
              call.rows);
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

template <typename T, typename Shape, Activation kActivation, bool kResidual, bool kGammaInRows>
Status HopperLinear::launch_few(const Call& call) {
  const auto kernel = few_rows_kernel<T, Shape, kActivation, kResidual, kGammaInRows>;
  const int x_rows = std::min(call.tile_rows, tiles_of(call.rows, 8) * 8);  // whole swizzle patterns
  const int wanted = tiles_of(weights_.in, Shape::kDepth);
  const dim3 grid(tiles_of(weights_.out, Shape::kColumns), tiles_of(call.rows, x_rows));
  const bool alone = call.rows > Shape::kRows && int(grid.x * grid.y) <= owner_.processors();
  const int room = alone ? kAloneBytes : kFewBytes;
  const int fitting = (room - Shape::shared_bytes(0, x_rows)) / (Shape::stage_bytes(x_rows) + 16);
  const int stages = std::min({wanted, Shape::kMaxStages, fitting});
  EMBERT_TRY(owner_.allow_shared_memory(reinterpret_cast<const void*>(kernel), kAloneBytes));
  const CUtensorMap *x_map = nullptr, *w_map = nullptr;
  EMBERT_TRY(map_operands(call, x_rows, Shape::kColumns, Shape::kBoxes, x_map, w_map));
  call.y_parts = kSumColumns / Shape::kColumns;
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config = configure(call, Shape::shared_bytes(stages, x_rows), attributes);
  config.gridDim = grid;
  config.blockDim = dim3(kFewThreads);
  return said(cudaLaunchKernelEx(&config, kernel, *x_map, *w_map, arguments_of(call), x_rows, stages), call.rows);
}

Status HopperLinear::said(cudaError_t code, int rows) const {
  if (code == cudaSuccess) return {};
  return Status::cuda(code, ("hopper gemm (" + std::to_string(rows) + " rows, " + std::to_string(weights_.in) + " to " +
                             std::to_string(weights_.out) + ")")
                                .c_str());
}

template <typename T, typename Shape, bool kGammaInRows>
Status HopperLinear::run_few(const Call& call) {
  if (call.residual.data != nullptr) return launch_few<T, Shape, Activation::kNone, true, kGammaInRows>(call);
  return with_activation(weights_.activation, [&](auto activation) {
    return launch_few<T, Shape, decltype(activation)::value, false, kGammaInRows>(call);
  });
}

template <typename T, bool kGammaInRows>
Status HopperLinear::run_plain(const Call& call) {
  const int tiles = tiles_of(call.rows, PingPongShape::kRows) * tiles_of(weights_.out, PingPongShape::kColumns);
  return with_activation(weights_.activation, [&](auto activation) {
    constexpr Activation kActivation = decltype(activation)::value;
    if (tiles <= owner_.processors()) return run_pingpong<T, kActivation, false, kGammaInRows>(call);
    if constexpr (!kGammaInRows) {  // a LayerNorm has at most kMaxSumColumns columns, fewer than that
      if (weights_.in > kMostPingPongIn) return run_wide<T, Wide256, kActivation, false, false>(call);
    }
    return run_pingpong<T, kActivation, true, kGammaInRows>(call);
  });
}

template <typename T, bool kGammaInRows>
Status HopperLinear::run_residual(const Call& call) {
  const int steps = tiles_of(weights_.in, kDepth);
  const auto cost = [&](auto of) {
    using Shape = decltype(of);
    const int tile_rows = tiles_of(call.rows, Shape::kRows * kCluster);
    const int across = tiles_of(weights_.out, Shape::kColumns);
    int step = tiles_of(tile_rows * across, owner_.clusters()) * kWideCost<Shape>.step;
    if constexpr (Shape::kNarrows) step = narrowing_of(tile_rows, across, owner_.clusters()).step;
    return steps * step + kWideCost<Shape>.rest;
  };
  const int least = std::min({cost(Wide256{}), cost(Wide128{}), cost(Tall128{})});
  if (least == cost(Wide256{})) return run_wide<T, Wide256, Activation::kNone, true, kGammaInRows>(call);
  if (least == cost(Wide128{})) return run_wide<T, Wide128, Activation::kNone, true, kGammaInRows>(call);
  return run_wide<T, Tall128, Activation::kNone, true, kGammaInRows>(call);
}

template <typename T>
Status HopperLinear::run_type(const Call& call) {
  const bool adds = call.residual.data != nullptr;
  if (adds && weights_.activation != Activation::kNone)
    return Status::refused("hopper gemm: a residual and an activation");
  if (!adds && call.y_sums != nullptr) return Status::refused("hopper gemm: sums come with a residual only");
  // A product that has neither norm takes its rows as they are.
  const bool in_rows = weights_.gamma_in_rows && (adds || weights_.input_norm.gamma != nullptr);
  return in_rows ? run_tiled<T, true>(call) : run_tiled<T, false>(call);
}

template <typename T, bool kGammaInRows>
Status HopperLinear::run_tiled(const Call& call) {
  const bool adds = call.residual.data != nullptr;
  // Tiles change no bits, so any rule is right.
  const int few_tiles = tiles_of(call.rows, 64) * tiles_of(weights_.out, 64);
  const bool is_few = few_tiles <= kFewTiles[weights_.out > weights_.in ? 0 : 1] && call.rows <= kMostFewRows;
  if (is_few && weights_.in % 64 == 0) {
    const FewTile tile = few_tile(call.rows, weights_.out, weights_.in);
    Call tiled = call;
    tiled.tile_rows = tile.rows;
    return tile.columns == 64 ? run_few<T, Middle, kGammaInRows>(tiled) : run_few<T, Narrow, kGammaInRows>(tiled);
  }
  return adds ? run_residual<T, kGammaInRows>(call) : run_plain<T, kGammaInRows>(call);
}

Status HopperLinear::run(const Rows& x, const Rows& residual, int rows, void* y, float2* y_sums, int& y_parts,
                         const Stream& stream) {
  if (rows == 0) return {};
  EMBERT_TRY(check_places(x, residual, y, y_sums));
  const Call call{x, residual, rows, y, y_sums, y_parts, stream};
  return owner_.dtype() == DType::kFloat16 ? run_type<half_t>(call) : run_type<bfloat_t>(call);
}

}  // namespace hopper

Status make_hopper(DType dtype, std::unique_ptr<GemmProvider>& provider) {
  if (dtype == DType::kFloat32) return Status::refused("hopper gemm: 16-bit types only");
  auto made = std::make_unique<hopper::Hopper>(dtype);
  EMBERT_TRY(made->open());
  provider = std::move(made);
  return {};
}

}  // namespace embert
