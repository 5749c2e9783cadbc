// Products of 8 bits: rows of x are quantised by a kernel of their own, then multiplied as integers (EPILOGUES.md).

#include <algorithm>

#include "gemm/epilogue/fold.cuh"
#include "gemm/kernels/cooperative.cuh"
#include "gemm/kernels/int8_dequant.cuh"
#include "gemm/kernels/residual_pingpong.cuh"
#include "gemm/kernels/sm90.h"

namespace embert::hopper {
namespace {

using Wide256 = WideShape<256, 4>;
using Wide128 = WideShape<128, 6>;
using Tall128 = WideShape<128, 4, 3>;
using FewMiddle = FewShape<64>;
using FewNarrow = FewShape<32>;

constexpr int kColumnPadding = 256;  // the epilogue reads whole tiles of columns

// The constants of a product without a residual: {scale, factor·bias} of each column.
__global__ void __launch_bounds__(kFoldThreads)
    pair_scales_kernel(const float* scales, const float* bias, int out, float factor, float2* columns) {
  wait_for_earlier_kernels();
  const int n = blockIdx.x * kFoldThreads + threadIdx.x;
  if (n < out) columns[n] = {scales[n], factor * bias[n]};
}

class Int8Linear final : public Linear {
 public:
  Int8Linear(Hopper& owner, const LinearWeights& weights) : owner_(owner), weights_(weights) {}

  // With a residual, {γ, bias + β} of each column and then the scales; else {scale, factor·bias}. Zeros past the last.
  Status init(const Stream& stream) {
    const int blocks = tiles_of(weights_.out, kFoldThreads);
    padded_ = tiles_of(weights_.out, kColumnPadding) * kColumnPadding;
    EMBERT_TRY(columns_.allocate(padded_ * (sizeof(float2) + sizeof(float) + sizeof(half_t))));
    EMBERT_CUDA(cudaMemsetAsync(columns_.as(), 0, columns_.bytes(), stream.handle));
    if (weights_.residual_norm.gamma == nullptr)
      return launch("pair_scales", pair_scales_kernel, blocks, kFoldThreads, 0, stream, weights_.scales, weights_.bias,
                    weights_.out, pair_factor(weights_.activation), columns_.as<float2>());
    EMBERT_CUDA(cudaMemcpyAsync(scales(), weights_.scales, weights_.out * sizeof(float), cudaMemcpyDeviceToDevice,
                                stream.handle));
    return launch("fold_residual", fold_residual_kernel<half_t>, blocks, kFoldThreads, 0, stream, weights_.bias,
                  weights_.residual_norm, static_cast<const float*>(nullptr), weights_.out, columns_.as<float2>(),
                  reinterpret_cast<half_t*>(scales() + padded_));
  }

  Status run(const Rows& x, const Rows& residual, int rows, void* y, float2* y_sums, int& y_parts,
             const Stream& stream) override {
    if (rows == 0) return {};
    EMBERT_TRY(check_places(x, residual, y, y_sums));
    const bool adds = residual.data != nullptr;
    EMBERT_TRY(check_residual_int8(weights_, residual, y_sums));
    y_parts = 1;
    if (x.maxima != nullptr) {
      if (!takes_blocks(rows)) return Status::refused("hopper int8: x comes in blocks, which are not for this product");
      return run_blocks({residual, rows, y, y_sums, stream, static_cast<const int8_t*>(x.data), x.maxima});
    }
    EMBERT_TRY(quantise(x, rows, stream));
    const Call call{residual, rows, y, y_sums, stream, weights_.quantised.data};
    const TileChoice tile = tile_of(rows);
    if (tile.kernel == TileKernel::kFewRows) return run_few(call, tile, y_parts);
    if (adds) return run_any_wide<0>(call, tile.kernel);
    return with_activation(weights_.activation, [&](auto activation) {
      constexpr Activation kActivation = decltype(activation)::value;
      return tile.kernel == TileKernel::kShared ? run_plain(call, scaled_kernel<kActivation, false>)
                                                : run_plain(call, scaled_kernel<kActivation, true>);
    });
  }

  bool takes_blocks(int rows) const override {
    return rows > 0 && weights_.block > 0 && tile_of(rows).kernel != TileKernel::kFewRows;
  }
  int columns() const { return weights_.out; }

  // y in blocks of 128 columns, where leaves_blocks.
  bool leaves_blocks(int rows) const { return rows > 0 && tile_of(rows).kernel != TileKernel::kFewRows; }
  Status leave_blocks(const Rows& x, int rows, const QuantisedBlocks& to, const Stream& stream) {
    EMBERT_TRY(quantise(x, rows, stream));
    const Call call{{}, rows, to.data, nullptr, stream, weights_.quantised.data, to.maxima};
    return with_activation(weights_.activation, [&](auto activation) {
      constexpr Activation kActivation = decltype(activation)::value;
      return tile_of(rows).kernel == TileKernel::kShared ? run_plain(call, block_kernel<kActivation, false>)
                                                         : run_plain(call, block_kernel<kActivation, true>);
    });
  }

 private:
  struct Call {
    const Rows& residual;
    int rows;
    void* y;
    float2* y_sums;
    const Stream& stream;
    const int8_t* x;
    const void* maxima = nullptr;  // of blocks: y's, or x's where there is a residual
  };

  Status quantise(const Rows& x, int rows, const Stream& stream) const {
    if (x.data == nullptr) return {};
    EMBERT_TRY(check_input_int8(weights_, x));
    if (weights_.block > 0)
      return quantise_block_rows(owner_.dtype(), x.data, rows, weights_.in, weights_.block, weights_.quantised, stream);
    return quantise_rows(owner_.dtype(), weights_.input_norm.gamma == nullptr ? Rows{x.data} : x, weights_.input_norm,
                         rows, weights_.in, weights_.epsilon, weights_.quantised, stream);
  }
  TileChoice tile_of(int rows) const {
    return choose_int8_tile({rows, weights_.out, weights_.in, weights_.residual_norm.gamma != nullptr},
                            owner_.processors());
  }
  template <int kBlock>
  Status run_any_wide(const Call& call, TileKernel kernel) {
    if (kernel == TileKernel::kTurns256) return run_turns<kBlock>(call);
    if (kernel == TileKernel::kWide256) return run_wide<Wide256, kBlock>(call);
    return kernel == TileKernel::kWide128 ? run_wide<Wide128, kBlock>(call) : run_wide<Tall128, kBlock>(call);
  }
  Status run_blocks(const Call& call) {
    const TileKernel kernel = tile_of(call.rows).kernel;
    return weights_.block == kInnerBlock ? run_any_wide<kInnerBlock>(call, kernel)
                                         : run_any_wide<kHeadBlock>(call, kernel);
  }

  float* scales() const { return reinterpret_cast<float*>(columns_.as<float2>() + padded_); }
  ProductScales product_scales(const Call& call) const {
    return {weights_.quantised.scales, reinterpret_cast<const float2*>(scales()), const_cast<void*>(call.maxima)};
  }

  GemmArguments arguments_of(const Call& call, int tile_columns) const {
    GemmArguments of{};
    of.columns = columns_.as();
    of.residual = call.residual.data;
    of.y = call.y;
    of.row_sums = call.residual.sums;
    of.y_sums = call.y_sums;
    of.parts = call.residual.parts;
    of.part_columns = kSumColumns / std::max(call.residual.parts, 1);
    of.width = weights_.out;
    of.inverse_width = 1.0f / float(weights_.out);
    of.epsilon = weights_.epsilon;
    of.rows = call.rows;
    of.out = weights_.out;
    of.in = weights_.in;
    of.backwards = call.stream.backwards;
    const uint32_t tiles_across = tiles_of(weights_.out, tile_columns);
    of.columns_inverse = ((1u << 31) + tiles_across - 1) / tiles_across;
    return of;
  }

  Status map_operands(const Call& call, int x_rows, int w_rows, const CUtensorMap*& x_map, const CUtensorMap*& w_map,
                      int boxes = 0) {
    EMBERT_TRY(owner_.map({call.x, call.rows, weights_.in, x_rows, kByteColumns, boxes}, x_map));
    return owner_.map({weights_.weight, weights_.out, weights_.in, w_rows, kByteColumns, boxes}, w_map);
  }

  Status run_few(const Call& call, const TileChoice& tile, int& y_parts) {
    if (call.residual.data != nullptr) {
      y_parts = kSumColumns / FewNarrow::kColumns;
      return launch_few<FewNarrow>(call, tile.rows, few_rows_scaled_kernel<FewNarrow, Activation::kNone, true>);
    }
    return with_activation(weights_.activation, [&](auto activation) {
      constexpr Activation kActivation = decltype(activation)::value;
      return tile.columns == 64
                 ? launch_few<FewMiddle>(call, tile.rows, few_rows_scaled_kernel<FewMiddle, kActivation, false>)
                 : launch_few<FewNarrow>(call, tile.rows, few_rows_scaled_kernel<FewNarrow, kActivation, false>);
    });
  }

  template <typename Shape, typename Kernel>
  Status launch_few(const Call& call, int tile_rows, Kernel kernel) {
    const int x_rows = std::min(tile_rows, tiles_of(call.rows, 8) * 8);  // whole swizzle patterns
    const dim3 grid(tiles_of(weights_.out, Shape::kColumns), tiles_of(call.rows, x_rows));
    const int stages = few_stages<Shape>(call.rows, x_rows, tiles_of(weights_.in, Shape::kBoxes * kByteColumns),
                                         int(grid.x * grid.y), owner_.processors());
    EMBERT_TRY(owner_.allow_shared_memory(reinterpret_cast<const void*>(kernel), kAloneBytes));
    const CUtensorMap *x_map = nullptr, *w_map = nullptr;
    EMBERT_TRY(map_operands(call, x_rows, Shape::kColumns, x_map, w_map, Shape::kBoxes));
    return launch("hopper int8", kernel, grid, kFewThreads, Shape::shared_bytes(stages, x_rows), call.stream, *x_map,
                  *w_map, arguments_of(call, Shape::kColumns), x_rows, stages, product_scales(call));
  }

  template <typename Kernel>
  Status run_plain(const Call& call, Kernel kernel) {
    using Shape = PingPongShape;
    EMBERT_TRY(owner_.allow_shared_memory(reinterpret_cast<const void*>(kernel), Shape::kSharedBytes));
    const CUtensorMap *x_map = nullptr, *w_map = nullptr, *y_map = nullptr;
    EMBERT_TRY(map_operands(call, Shape::kRows, Shape::kWShare, x_map, w_map));
    const bool bytes = call.maxima != nullptr;
    EMBERT_TRY(owner_.map({call.y, call.rows, weights_.out, 16, bytes ? kByteColumns : 64}, y_map));  // a warp's rows
    const int tiles = tiles_of(call.rows, Shape::kRows * kCluster) * tiles_of(weights_.out, Shape::kColumns);
    return launch_clusters("hopper int8", kernel, kCluster, std::min(tiles, owner_.clusters()) * kCluster,
                           Shape::kThreads, Shape::kSharedBytes, call.stream, *x_map, *w_map, *y_map,
                           arguments_of(call, Shape::kColumns), product_scales(call));
  }

  template <int kBlock>
  Status run_turns(const Call& call) {
    using Shape = ResidualTurns;
    const auto kernel = residual_turns_kernel<kBlock>;
    EMBERT_TRY(owner_.allow_shared_memory(reinterpret_cast<const void*>(kernel), Shape::kSharedBytes));
    const CUtensorMap *x_map = nullptr, *w_map = nullptr, *y_map = nullptr, *residual_map = nullptr;
    EMBERT_TRY(map_operands(call, Shape::kRows, Shape::kWShare, x_map, w_map));
    EMBERT_TRY(owner_.map({call.y, call.rows, weights_.out, 16, 64}, y_map));  // a warp's rows
    EMBERT_TRY(owner_.map({call.residual.data, call.rows, weights_.out, 16, 64}, residual_map));
    const int tiles = tiles_of(call.rows, Shape::kRows * kCluster) * tiles_of(weights_.out, Shape::kColumns);
    return launch_clusters("hopper int8", kernel, kCluster, std::min(tiles, owner_.clusters()) * kCluster,
                           Shape::kThreads, Shape::kSharedBytes, call.stream, *x_map, *w_map, *residual_map, *y_map,
                           arguments_of(call, Shape::kColumns), product_scales(call));
  }

  template <typename Shape, int kBlock>
  Status run_wide(const Call& call) {
    const auto kernel = wide_scaled_kernel<Shape, kBlock>;
    EMBERT_TRY(owner_.allow_shared_memory(reinterpret_cast<const void*>(kernel), Shape::kSharedBytes));
    const CUtensorMap *x_map = nullptr, *w_map = nullptr, *y_map = nullptr, *residual_map = nullptr;
    EMBERT_TRY(map_operands(call, Shape::kRows, Shape::kWShare, x_map, w_map));
    EMBERT_TRY(owner_.map({call.y, call.rows, weights_.out, 16, 64}, y_map));  // a warp's rows
    EMBERT_TRY(owner_.map({call.residual.data, call.rows, weights_.out, Shape::kRows, 64}, residual_map));
    const CUtensorMap* narrow_w_map = w_map;
    const int tile_rows = tiles_of(call.rows, Shape::kRows * kCluster);
    const int across = tiles_of(weights_.out, Shape::kColumns);
    int whole_rows = tile_rows;
    if constexpr (Shape::kNarrows) {
      whole_rows = narrowing_of(tile_rows, across, owner_.clusters()).whole_rows;
      EMBERT_TRY(
          owner_.map({weights_.weight, weights_.out, weights_.in, Shape::kWShare / 2, kByteColumns}, narrow_w_map));
    }
    const int tiles = (2 * tile_rows - whole_rows) * across;
    return launch_clusters("hopper int8", kernel, kCluster, std::min(tiles, owner_.clusters()) * kCluster,
                           Shape::kThreads, Shape::kSharedBytes, call.stream, *x_map, *w_map, *narrow_w_map,
                           *residual_map, *y_map, arguments_of(call, Shape::kColumns), whole_rows,
                           product_scales(call));
  }

  Hopper& owner_;
  LinearWeights weights_;
  DeviceBuffer columns_;
  int padded_ = 0;
};

// The inner rows pass between the products in 8 bits where both are of many rows: none is written in FP16, none is read
// to be quantised.
class Int8FeedForward final : public FeedForward {
 public:
  Int8FeedForward(std::unique_ptr<Int8Linear> in, std::unique_ptr<Int8Linear> out)
      : in_(*in), out_(*out), apart_(std::move(in), std::move(out)) {}

  Status run(const Rows& x, int rows, void* inner, void* y, float2* y_sums, int& y_parts, Stream& along) override {
    if (!in_.leaves_blocks(rows) || !out_.takes_blocks(rows))
      return apart_.run(x, rows, inner, y, y_sums, y_parts, along);
    const QuantisedBlocks blocks = QuantisedBlocks::in(inner, rows, in_.columns());
    EMBERT_TRY(in_.leave_blocks(x, rows, blocks, along.turned()));
    Rows between{blocks.data};
    between.maxima = blocks.maxima;
    return out_.run(between, x, rows, y, y_sums, y_parts, along.turned());
  }

 private:
  Int8Linear &in_, &out_;  // which apart_ owns
  TwoProducts apart_;
};

}  // namespace

bool Hopper::join_int8(std::unique_ptr<Linear>& in, std::unique_ptr<Linear>& out,
                       std::unique_ptr<FeedForward>& joined) {
  if (dynamic_cast<Int8Linear*>(in.get()) == nullptr || dynamic_cast<Int8Linear*>(out.get()) == nullptr) return false;
  const auto own = [](std::unique_ptr<Linear>& linear) {
    return std::unique_ptr<Int8Linear>(static_cast<Int8Linear*>(linear.release()));
  };
  std::unique_ptr<Int8Linear> first = own(in), second = own(out);
  joined = std::make_unique<Int8FeedForward>(std::move(first), std::move(second));
  return true;
}

Status Hopper::prepare_int8(const LinearWeights& weights, const Stream& stream, std::unique_ptr<Linear>& linear) {
  if (!has_int8()) return Status::refused("hopper int8: rows must be in float16");
  if (weights.pitch != 0 || weights.gated || weights.rotary != nullptr || weights.gamma_in_rows)
    return Status::refused("hopper int8: gates, turned columns, pitches and gammas in rows are for 16 bits");
  if (!quantise_takes(weights.in, weights.input_norm.gamma != nullptr) || weights.out % 64 != 0 ||
      tiles_of(weights.out, 128) > 256)
    return Status::refused("hopper int8: " + std::to_string(weights.in) + " to " + std::to_string(weights.out) +
                           " columns");
  if (weights.residual_norm.gamma != nullptr &&
      (weights.activation != Activation::kNone || weights.out > kMaxSumColumns))
    return Status::refused("hopper int8: a residual and an activation, or over 1024 columns");
  auto made = std::make_unique<Int8Linear>(*this, weights);
  EMBERT_TRY(made->init(stream));
  linear = std::move(made);
  return {};
}

}  // namespace embert::hopper
