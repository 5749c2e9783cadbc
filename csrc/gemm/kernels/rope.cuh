// QKV GEMMs with RoPE: the main loops of pingpong.cuh and small_m.cuh with an epilogue that rotates queries and keys.
// They never use cooperative.cuh, which would gain 1 % from K = 2 048 on, beyond the widest encoder.
//
// RoPE costs loads of (cos, sin): 16 bytes for a lane's two elements in two rows. A tile of 128 × 128 loads 32 KB where
// the head size divides 64, because both of its boxes of 64 columns use the same values, and otherwise 64 KB. That is a
// tenth of what the tile reads at K = 768. The table of 8 192 positions and 64 columns is 2 MB, so loads hit the L2
// cache. In ping-pong the other consumer's products hide them.
#pragma once

#include "common/numeric.cuh"
#include "gemm/epilogue/finish.cuh"
#include "gemm/epilogue/store.cuh"
#include "gemm/kernels/small_m.cuh"
#include "ops/elementwise.h"

namespace embert::sm90 {

// RoPE in the epilogue: queries and keys are rotated by their positions in FP32, before the one rounding
// (EPILOGUES.md).

constexpr int kRopeColumns = 64;  // RoPE applies to groups of this many columns

// True if the 64 columns around `column` hold a query or a key. All main loops use the same rule, so that values keep
// their bits, also those that are not finite.
__device__ __forceinline__ bool has_rotated_columns(const RopeColumns& rope, int column) {
  return column / kRopeColumns * kRopeColumns < rope.columns;
}

// Reads the positions of a lane's two rows; rows past the end are read as the last row. For use after
// griddepcontrol_wait. The loads bypass the L1 cache, which may hold the positions of the previous batch.
__device__ __forceinline__ void prefetch_positions(const RopeColumns& rope, int row, int rows, int (&positions)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) positions[i] = __ldcg(rope.positions + min(row + 8 * i, rows - 1));
}

// Reads (cos, sin) for a lane's pairs in consecutive tiles of 8 columns, in two rows. Heads are a multiple of 8
// columns, so a tile lies in one head, and one division locates all pairs. Pairs that are not rotated get (1, 0).
// Four lanes read 32 adjacent bytes, a sector of the cache.
class CosSin {
 public:
  __device__ __forceinline__ CosSin(const RopeColumns& rope, int column, int lane, const int (&positions)[2])
      : rope_(rope), column_(column), in_head_(column % rope.head_size), pair_(lane % 4) {
#pragma unroll
    for (int i = 0; i < 2; ++i) rows_[i] = positions[i] * (rope.rotary_dim / 2);
  }
  template <int kTiles>
  __device__ __forceinline__ void prefetch(float2 (&cos_sin)[kTiles][2]) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int pair = in_head_ / 2 + pair_;
      const bool is_rotated = pair < rope_.rotary_dim / 2 && column_ < rope_.columns;
#pragma unroll
      for (int i = 0; i < 2; ++i)
        cos_sin[tile][i] = is_rotated ? __ldg(rope_.table + (rows_[i] + pair)) : float2{1.0f, 0.0f};
      in_head_ += 8, column_ += 8;
      if (in_head_ == rope_.head_size) in_head_ = 0;
    }
  }

 private:
  const RopeColumns& rope_;
  int rows_[2];  // their offsets in the table
  int column_, in_head_, pair_;
};

// Two adjacent elements of y (normed), rotated where `rotates`.
template <typename T, bool kPrescaledRows>
__device__ __forceinline__ uint32_t finish_rope(float low, float high, ColumnPair<false, kPrescaledRows> k,
                                                float2 scale_shift, bool rotates, float2 cos_sin) {
  const float2 two = normed<kPrescaledRows>(low, high, k, scale_shift);
  if (!rotates) return pack_two<T>(two.x, two.y);
  return pack_two<T>(fmaf(two.x, cos_sin.x, -(two.y * cos_sin.y)), fmaf(two.y, cos_sin.x, two.x * cos_sin.y));
}

// The store epilogue (store.cuh) with RoPE.
template <typename T, bool kPingPong, bool kPrescaledRows>
class RopeEpilogue : public TileRows<kPingPong, kPrescaledRows> {
  using Base = TileRows<kPingPong, kPrescaledRows>;
  using Shape = PingPongShape;
  using Base::kHalves, Base::args_, Base::lane_, Base::tiles_, Base::columns_, Base::row_, Base::column_;

 public:
  __device__ __forceinline__ RopeEpilogue(uint8_t* smem, const GemmArguments& args, const TileScheduler<Shape>& tiles,
                                          const CUtensorMap& y_map, int consumer, int consumer_row,
                                          const RopeColumns& rope)
      : Base(smem, args, tiles, y_map, consumer, consumer_row),
        rope_(rope),
        repeats_(kRopeColumns % rope.head_size == 0 && rope.columns % kRopeColumns == 0) {}

  __device__ __forceinline__ void first(int tile) {
    this->prefetch_columns(tile);
    griddepcontrol_wait();
    this->prefetch_row_stats(tile);
    prefetch(tile);
  }

  __device__ __forceinline__ void after(const float (&c)[kHalves][Shape::kColumns / 2], int /* ordinal */, int next) {
    float2 scale[kHalves][2];
    this->compute_row_scales(1.0f, scale);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float2 cos_sin[8][2];
#pragma unroll
      for (int box = 0; box < Shape::kColumns / 64; ++box) {
        const int column = column_ + box * 64;
        const bool is_rotated = has_rotated_columns(rope_, column);
        if (is_rotated && (box == 0 || !repeats_)) CosSin(rope_, column, lane_, positions_[half]).prefetch(cos_sin);
        const uint32_t box_at = this->staging_ + (half * (Shape::kColumns / 64) + box) % Shape::kBoxes * kBoxBytes;
        uint32_t packed[4][4];  // 16 columns each, as two m16n8 accumulators with rows 0-7 and 8-15
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int element = 32 * box + 2 * i;
          packed[i / 4][i % 4] = finish_rope<T, kPrescaledRows>(c[half][element], c[half][element + 1],
                                                                columns_[box * 32 + i / 2 * 4 + lane_ % 4],
                                                                scale[half][i % 2], is_rotated, cos_sin[i / 2][i % 2]);
        }
        wait_for_box<Shape::kBoxes - 1>(lane_);
#pragma unroll
        for (int i = 0; i < 4; ++i) stmatrix_x4(box_at + swizzle_128b(lane_ % 16, 2 * i + lane_ / 16), packed[i]);
        store_box(this->y_map_, box_at, column, row_ + half * 64, lane_);
      }
      if (half == 0 && next < tiles_.end) this->prefetch_columns(next);  // not earlier: there are too few registers
    }
    if (next < tiles_.end) {  // they arrive during the products
      this->prefetch_row_stats(next);
      prefetch(next);
    }
  }

 private:
  __device__ __forceinline__ void prefetch(int tile) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int row = tiles_.row_of(tile) + this->consumer_row_ + half * 64 + this->warp_ * 16 + lane_ / 4;
      prefetch_positions(rope_, row, args_.m, positions_[half]);
    }
  }

  const RopeColumns& rope_;
  bool repeats_;  // a tile's second box uses the same (cos, sin) as its first
  int positions_[kHalves][2];
};

template <typename T, bool kPingPong, bool kPrescaledRows>
__global__ void __launch_bounds__(PingPongShape::kThreads, 1)
    pingpong_rope_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                         const __grid_constant__ CUtensorMap y_map, const GemmArguments args, const RopeColumns rope) {
  EMBERT_SM90A("pingpong_rope_kernel",
               run_pingpong<T, kPingPong, RopeEpilogue<T, kPingPong, kPrescaledRows>>(x_map, w_map, y_map, args, rope));
}

// The epilogue of small M (small_m.cuh) with RoPE. With a narrow tile, (cos, sin) are in flight during the products.
// Otherwise registers suffice only for the positions.
template <typename T, typename Shape, bool kPrescaledRowsValue>
struct SmallMRope {
  static constexpr bool kResidual = false, kPrescaledRows = kPrescaledRowsValue, kGates = false;
  static constexpr float kFactor = 1.0f;
  static constexpr bool kEarly = Shape::kColumns == 32;
  static constexpr int kTiles = kEarly ? Shape::kColumns / 8 : 2;  // tiles of 8 columns whose (cos, sin) are held
  struct Operands {
    int positions[2];
    bool is_rotated;
    float2 cos_sin[kTiles][2];
  };

  __device__ __forceinline__ void prefetch(const SmallMPosition& position, Operands& operands) const {
    griddepcontrol_wait();
    prefetch_positions(rope, position.row, rows, operands.positions);
    operands.is_rotated = has_rotated_columns(rope, position.column);
    if (kEarly) CosSin(rope, position.column, position.lane, operands.positions).prefetch(operands.cos_sin);
  }
  __device__ __forceinline__ void load_chunk(const SmallMPosition& position, int chunk, Operands& operands) const {
    if (!kEarly)
      CosSin(rope, position.column + chunk * 16, position.lane, operands.positions).prefetch(operands.cos_sin);
  }
  __device__ __forceinline__ uint32_t pair(float low, float high, ColumnPair<false, kPrescaledRows> k,
                                           float2 scale_shift, uint32_t /* residual */, uint32_t /* next */,
                                           bool /* first */, float2& /* sum */, const Operands& operands,
                                           int index) const {
    return finish_rope<T, kPrescaledRows>(low, high, k, scale_shift, operands.is_rotated,
                                          operands.cos_sin[index / 2 % kTiles][index % 2]);
  }

  const RopeColumns& rope;
  int rows;  // of x
};

template <typename T, typename Shape, bool kPrescaledRows>
__global__ void __launch_bounds__(kSmallMThreads, 2)
    small_m_rope_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                        const GemmArguments args, int x_rows, int stages, const RopeColumns rope) {
  EMBERT_SM90A("small_m_rope_kernel", small_m_tile<T, Shape>(x_map, w_map, args, x_rows, stages,
                                                             SmallMRope<T, Shape, kPrescaledRows>{rope, args.m}));
}

}  // namespace embert::sm90
