// RoPE in the epilogue: queries and keys are rotated by their positions in FP32, before the one rounding
// (EPILOGUES.md).
#pragma once

#include "common/numeric.cuh"
#include "gemm/epilogue/finish.cuh"
#include "gemm/gemm.h"

namespace embert::sm90 {

constexpr int kRopeColumns = 64;  // RoPE applies to groups of this many columns

// Whether the 64 columns around `column` hold a query or a key. All main loops use the same rule, so that values keep
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
__device__ __forceinline__ uint32_t finish_rope(float low, float high, ColumnPair<false, kPrescaledRows> k, float2 by,
                                                bool rotates, float2 cos_sin) {
  const float2 two = normed<kPrescaledRows>(low, high, k, by);
  if (!rotates) return pack_two<T>(two.x, two.y);
  return pack_two<T>(fmaf(two.x, cos_sin.x, -(two.y * cos_sin.y)), fmaf(two.y, cos_sin.x, two.x * cos_sin.y));
}

}  // namespace embert::sm90
