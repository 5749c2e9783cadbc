// y[rows, out] = activation(x[rows, in] · W[out, in]ᵀ + bias) with x and W in int8, on Hopper: QKV and FFN in, and for
// small M all four GEMMs. The main loops are those of 16 bits (pingpong.cuh, small_m.cuh), whose stages are counted in
// bytes. Sums are exact integers, so neither the tile nor the order of additions changes a bit. The epilogue
// dequantizes: it multiplies sums by the row's scale and the column's (ops/quantize.h).
#pragma once

#include "gemm/epilogue/store.cuh"
#include "gemm/kernels/small_m.cuh"
#include "ops/blocks.cuh"
#include "ops/quantize.h"

namespace embert::sm90 {

// The store epilogue, as StoreEpilogue. The columns' constants are (scale, c).
template <Activation kActivation, bool kPingPong>
class DequantEpilogue : public TileRows<kPingPong, true> {
  using Base = TileRows<kPingPong, true>;
  using Shape = PingPongShape;

 protected:
  using Base::kHalves, Base::lane_, Base::tiles_, Base::columns_, Base::staging_, Base::row_, Base::column_;

 public:
  __device__ __forceinline__ DequantEpilogue(uint8_t* smem, const GemmArguments& args,
                                             const TileScheduler<Shape>& tiles, const CUtensorMap& y_map, int consumer,
                                             int consumer_row, const DequantScales& scales)
      : Base(smem, args, tiles, y_map, consumer, consumer_row), row_scales_(scales.rows) {}

  __device__ __forceinline__ void first(int tile) {
    this->prefetch_columns(tile);
    griddepcontrol_wait();
    prefetch_scales(tile);
  }

  __device__ __forceinline__ void after(const int (&c)[kHalves][Shape::kColumns / 2], int /* ordinal */, int next) {
    float scale[kHalves][2];
    compute_row_scales(scale);
    if (next < tiles_.end) prefetch(next);
#pragma unroll
    for (int box = 0; box < Shape::kColumns / 64; ++box) {
      float4 column_constants[8];  // of columns 8i + 2 · (lane % 4) and the next
#pragma unroll
      for (int i = 0; i < 8; ++i) column_constants[i] = columns_[box * 32 + i * 4 + lane_ % 4];
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const uint32_t box_at = staging_ + (box * kHalves + half) % Shape::kBoxes * kBoxBytes;
        uint32_t packed[4][4];  // 16 columns each, as two m16n8 accumulators with rows 0-7 and 8-15
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int element = 32 * box + 2 * i;
          packed[i / 4][i % 4] = finish_sums<kActivation>(c[half][element], c[half][element + 1],
                                                          column_constants[i / 2], scale[half][i % 2]);
        }
        wait_for_box<Shape::kBoxes - 1>(lane_);
#pragma unroll
        for (int i = 0; i < 4; ++i) stmatrix_x4(box_at + swizzle_128b(lane_ % 16, 2 * i + lane_ / 16), packed[i]);
        store_box(this->y_map_, box_at, column_ + box * 64, row_ + half * 64, lane_);
      }
    }
  }

 protected:
  __device__ __forceinline__ void prefetch(int tile) {
    this->prefetch_columns(tile);
    prefetch_scales(tile);
  }
  // Scales of the current tile's rows.
  __device__ __forceinline__ void compute_row_scales(float (&scale)[kHalves][2]) const {
#pragma unroll
    for (int i = 0; i < 2 * kHalves; ++i) scale[i / 2][i % 2] = pair_factor(kActivation) * prefetched_[i / 2][i % 2];
  }

 private:
  // Rows past the end are read as the last row; their results are not stored.
  __device__ __forceinline__ void prefetch_scales(int tile) {
    const int first = tiles_.row_of(tile) + this->consumer_row_ + this->warp_ * 16 + lane_ / 4;
#pragma unroll
    for (int i = 0; i < 2 * kHalves; ++i)
      prefetched_[i / 2][i % 2] = row_scales_[min(first + i / 2 * 64 + i % 2 * 8, this->args_.m - 1)];
  }

  const float* row_scales_;
  float prefetched_[kHalves][2];
};

// The epilogue that stores y in int8, in blocks of 128 columns (ops/blocks.cuh): the input of the second GEMM of the
// feed-forward layer.
template <Activation kActivation, bool kPingPong>
class BlockEpilogue : public DequantEpilogue<kActivation, kPingPong> {
  using Base = DequantEpilogue<kActivation, kPingPong>;
  using Shape = PingPongShape;
  using Base::kHalves, Base::lane_, Base::tiles_, Base::columns_, Base::staging_, Base::row_, Base::column_;
  static_assert(Shape::kColumns == kInnerBlock, "a tile has a block of its rows");
  static_assert(kPairFactor * 4 == 1, "row_scale_of takes back a rotation of 16 columns, whose root is 4");

 public:
  __device__ __forceinline__ BlockEpilogue(uint8_t* smem, const GemmArguments& args, const TileScheduler<Shape>& tiles,
                                           const CUtensorMap& y_map, int consumer, int consumer_row,
                                           const DequantScales& scales)
      : Base(smem, args, tiles, y_map, consumer, consumer_row, scales), maxima_(static_cast<half_t*>(scales.maxima)) {}

  __device__ __forceinline__ void after(const int (&c)[kHalves][Shape::kColumns / 2], int /* ordinal */, int next) {
    float scale[kHalves][2];
    this->compute_row_scales(scale);
    if (next < tiles_.end) this->prefetch(next);
    uint32_t y[kHalves][2][16];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      float4 column_constants[8];  // of columns 8i + 2 · (lane % 4) and the next
#pragma unroll
      for (int i = 0; i < 8; ++i) column_constants[i] = columns_[part * 32 + i * 4 + lane_ % 4];
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int element = 32 * part + 2 * i;
          y[half][i % 2][8 * part + i / 2] = finish_sums<kActivation>(c[half][element], c[half][element + 1],
                                                                      column_constants[i / 2], scale[half][i % 2]);
        }
      }
    }
    wait_for_box<0>(lane_);
    static_assert(kHalves <= Shape::kBoxes, "each half has a box");
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      rotate_block(y[half]);
      const uint32_t maxima = block_maxima(y[half]);
      uint32_t bytes[2][8];
      round_block(y[half], maxima, bytes);
      const int row = row_ + half * 64 + lane_ / 4, blocks = this->args_.n / kInnerBlock;
      if (lane_ % 4 < 2 && row + lane_ % 4 * 8 < this->args_.m) {
        maxima_[size_t(row + lane_ % 4 * 8) * blocks + column_ / kInnerBlock] =
            lane_ % 4 == 0 ? __low2half(as_half2(maxima)) : __high2half(as_half2(maxima));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t four[4] = {bytes[0][2 * i], bytes[1][2 * i], bytes[0][2 * i + 1], bytes[1][2 * i + 1]};
        stmatrix_x4(staging_ + half * kBoxBytes + swizzle_128b(lane_ % 16, 2 * i + lane_ / 16), four);
      }
    }
    store_boxes<kHalves>(this->y_map_, staging_, kBoxBytes, column_, 0, row_, 64, lane_);
  }

 private:
  half_t* maxima_;  // [rows, blocks]
};

// The epilogue of small M (small_m.cuh), with a residual or without. Rows' scales are in flight during the products.
template <Activation kActivation, bool kResidualValue>
struct SmallMInt8 {
  static constexpr bool kResidual = kResidualValue, kGates = false;
  static constexpr bool kPrescaledRows = !kResidual;  // its constants have the same width: (scale, c, scale, c)
  static constexpr float kFactor = pair_factor(kActivation);
  struct Operands {
    float of_rows[2];
    float2 column_constants[2];
  };

  __device__ __forceinline__ void prefetch(const SmallMPosition& position, Operands& operands) const {
    griddepcontrol_wait();
#pragma unroll
    for (int half = 0; half < 2; ++half)
      operands.of_rows[half] = kFactor * scales.rows[min(position.row + 8 * half, position.rows - 1)];
  }
  __device__ __forceinline__ void load_chunk(const SmallMPosition& position, int chunk, Operands& operands) const {
    if constexpr (kResidual) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        operands.column_constants[i] =
            __ldg(scales.columns + (position.column + chunk * 16) / 2 + position.lane % 4 + 4 * i);
    }
  }
  __device__ __forceinline__ uint32_t pair(int low, int high, float4 k, float2 scale_shift, uint32_t residual,
                                           uint32_t /* next */, bool first, float2& sum, const Operands& operands,
                                           int index) const {
    const float row_scale_value = operands.of_rows[index % 2];
    if constexpr (kResidual) {
      const float2 pair_scales = operands.column_constants[index / 2 % 2];
      return finish<half_t, Activation::kNone, true, false>(dequantize(low, row_scale_value, pair_scales.x),
                                                            dequantize(high, row_scale_value, pair_scales.y), k,
                                                            scale_shift, residual, 0, first, sum);
    } else {
      return finish_sums<kActivation>(low, high, k, row_scale_value);
    }
  }

  const DequantScales& scales;
};

template <typename Shape, Activation kActivation, bool kResidual>
__global__ void __launch_bounds__(kSmallMThreads, 2)
    small_m_int8_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                        const GemmArguments args, int x_rows, int stages, const DequantScales scales) {
  EMBERT_SM90A("small_m_int8_kernel", small_m_tile<int8_t, Shape>(x_map, w_map, args, x_rows, stages,
                                                                  SmallMInt8<kActivation, kResidual>{scales}));
}

template <Activation kActivation, bool kPingPong>
__global__ void __launch_bounds__(PingPongShape::kThreads, 1)
    int8_dequant_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                        const __grid_constant__ CUtensorMap y_map, const GemmArguments args,
                        const DequantScales scales) {
  EMBERT_SM90A("int8_dequant_kernel", run_pingpong<int8_t, kPingPong, DequantEpilogue<kActivation, kPingPong>>(
                                          x_map, w_map, y_map, args, scales));
}

template <Activation kActivation, bool kPingPong>
__global__ void __launch_bounds__(PingPongShape::kThreads, 1)
    block_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                 const __grid_constant__ CUtensorMap y_map, const GemmArguments args, const DequantScales scales) {
  EMBERT_SM90A("block_kernel", run_pingpong<int8_t, kPingPong, BlockEpilogue<kActivation, kPingPong>>(
                                   x_map, w_map, y_map, args, scales));
}

}  // namespace embert::sm90
