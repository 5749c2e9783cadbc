// QKV products that turn queries and keys: the loops of store.cuh and small_m.cuh with an epilogue of their own.
// Such a product never takes cooperative.cuh, which would win 1 % from K = 2 048 on, beyond the widest encoder.
//
// Rotary positions cost loads of (cos, sin): 16 bytes for a lane's two elements in two rows. A tile of 128 × 128 loads
// 32 KB of them where the head size divides 64, because both of its boxes of 64 columns take the same ones, and else 64
// KB. That is a tenth of what the tile reads at K = 768. The table of 8 192 positions and 64 columns is 2 MB, so loads
// hit the L2 cache. In store.cuh the other consumer's products hide them.
#pragma once

#include "gemm/epilogue/rope.cuh"
#include "gemm/epilogue/store.cuh"
#include "gemm/kernels/small_m.cuh"

namespace embert::hopper {

// Rows of y (store.cuh).
template <typename T, bool kTurns, bool kGammaInRows>
class TurnedRows : public TileRows<kTurns, kGammaInRows> {
  using Base = TileRows<kTurns, kGammaInRows>;
  using Shape = PingPongShape;
  using Base::kHalves, Base::of_, Base::lane_, Base::tiles_, Base::columns_, Base::row_, Base::column_;

 public:
  __device__ __forceinline__ TurnedRows(uint8_t* raw, const GemmArguments& of, const Tiles<Shape>& tiles,
                                        const CUtensorMap& y_map, int consumer, int own_row,
                                        const RotaryColumns& rotary)
      : Base(raw, of, tiles, y_map, consumer, own_row),
        rotary_(rotary),
        repeats_(kTurnedColumns % rotary.head_size == 0 && rotary.columns % kTurnedColumns == 0) {}

  __device__ __forceinline__ void first(int tile) {
    this->ask_columns(tile);
    wait_for_earlier_kernels();
    this->ask_sums(tile);
    ask(tile);
  }

  __device__ __forceinline__ void after(const float (&c)[kHalves][Shape::kColumns / 2], int /* turn */, int next) {
    float2 scale[kHalves][2];
    this->take_scales(1.0f, scale);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float2 turns[8][2];
#pragma unroll
      for (int box = 0; box < Shape::kColumns / 64; ++box) {
        const int column = column_ + box * 64;
        const bool is_turned = holds_turned(rotary_, column);
        if (is_turned && (box == 0 || !repeats_)) Turns(rotary_, column, lane_, positions_[half]).ask(turns);
        const uint32_t box_at = this->own_staging_ + (half * (Shape::kColumns / 64) + box) % Shape::kBoxes * kBoxBytes;
        uint32_t packed[4][4];  // 16 columns each, as two m16n8 accumulators with rows 0-7 and 8-15
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int element = 32 * box + 2 * i;
          packed[i / 4][i % 4] = finish_turned<T, kGammaInRows>(c[half][element], c[half][element + 1],
                                                                columns_[box * 32 + i / 2 * 4 + lane_ % 4],
                                                                scale[half][i % 2], is_turned, turns[i / 2][i % 2]);
        }
        if (lane_ == 0) wait_stores_read<Shape::kBoxes - 1>();  // the store from this box has read it
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; ++i) store_matrices(box_at + swizzled(lane_ % 16, 2 * i + lane_ / 16), packed[i]);
        fence_for_copies();
        __syncwarp();
        if (lane_ == 0) {
          store_box(&this->y_map_, box_at, column, row_ + half * 64);
          commit_stores();
        }
      }
      if (half == 0 && next < tiles_.end) this->ask_columns(next);  // not earlier, for want of registers
    }
    if (next < tiles_.end) {  // they arrive during the products
      this->ask_sums(next);
      ask(next);
    }
  }

 private:
  __device__ __forceinline__ void ask(int tile) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int row = tiles_.row_of(tile) + this->own_row_ + half * 64 + this->warp_ * 16 + lane_ / 4;
      ask_positions(rotary_, row, of_.rows, positions_[half]);
    }
  }

  const RotaryColumns& rotary_;
  bool repeats_;  // a tile's second box takes what its first one does
  int positions_[kHalves][2];
};

template <typename T, bool kTurns, bool kGammaInRows>
__global__ void __launch_bounds__(PingPongShape::kThreads, 1)
    pingpong_rotary_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                           const __grid_constant__ CUtensorMap y_map, const GemmArguments of,
                           const RotaryColumns rotary) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Epilogue = TurnedRows<T, kTurns, kGammaInRows>;
  extern __shared__ __align__(1024) uint8_t raw[];  // a swizzle pattern is 1 024 bytes
  if (threadIdx.x == 32) prefetch_maps(x_map, w_map, y_map);
  open_turns<kTurns>(shared_address(raw));
  const Tiles<PingPongShape> tiles(of);
  multiply_in_turns<T, kTurns>(shared_address(raw), tiles, of.in, x_map, w_map, [&](int consumer, int own_row) {
    return Epilogue(raw, of, tiles, y_map, consumer, own_row, rotary);
  });
#else
  EMBERT_TRAP("pingpong_rotary_kernel");
#endif
}

// Rows of y (small_m.cuh). Where the tile is narrow, (cos, sin) are in flight during the products; else there are not
// enough registers, and the positions alone are.
template <typename T, typename Shape, bool kGammaInRowsValue>
struct FewTurned {
  static constexpr bool kResidual = false, kGammaInRows = kGammaInRowsValue, kGates = false;
  static constexpr float kFactor = 1.0f;
  static constexpr bool kEarly = Shape::kColumns == 32;
  static constexpr int kTiles = kEarly ? Shape::kColumns / 8 : 2;  // of 8 columns, whose (cos, sin) are held
  struct Held {
    int positions[2];
    bool is_turned;
    float2 turns[kTiles][2];
  };

  __device__ __forceinline__ void ask(const FewPlace& at, Held& held) const {
    wait_for_earlier_kernels();
    ask_positions(rotary, at.row, rows, held.positions);
    held.is_turned = holds_turned(rotary, at.column);
    if (kEarly) Turns(rotary, at.column, at.lane, held.positions).ask(held.turns);
  }
  __device__ __forceinline__ void look(const FewPlace& at, int chunk, Held& held) const {
    if (!kEarly) Turns(rotary, at.column + chunk * 16, at.lane, held.positions).ask(held.turns);
  }
  __device__ __forceinline__ uint32_t pair(float low, float high, ColumnPair<false, kGammaInRows> k, float2 by,
                                           uint32_t /* residual */, uint32_t /* next */, bool /* first */,
                                           float2& /* sum */, const Held& held, int which) const {
    return finish_turned<T, kGammaInRows>(low, high, k, by, held.is_turned, held.turns[which / 2 % kTiles][which % 2]);
  }

  const RotaryColumns& rotary;
  int rows;  // of x
};

template <typename T, typename Shape, bool kGammaInRows>
__global__ void __launch_bounds__(kFewThreads, 2)
    few_rows_rotary_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                           const GemmArguments of, int x_rows, int stages, const RotaryColumns rotary) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  multiply_few_rows<T, Shape>(x_map, w_map, of, x_rows, stages, FewTurned<T, Shape, kGammaInRows>{rotary, of.rows});
#else
  EMBERT_TRAP("few_rows_rotary_kernel");
#endif
}

}  // namespace embert::hopper
