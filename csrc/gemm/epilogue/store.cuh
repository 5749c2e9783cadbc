// The store epilogue of ping-pong GEMMs: applies the LayerNorm of x, the bias and the activation, and stores rows of
// y. TileRows is the base of the other epilogues of this main loop.
#pragma once

#include "common/barrier.cuh"
#include "common/shared_memory.cuh"
#include "gemm/epilogue/finish.cuh"
#include "gemm/epilogue/row_stats.cuh"
#include "gemm/mainloop/pingpong.cuh"

namespace embert::sm90 {

// The common part of this main loop's epilogues (pingpong.cuh). Loads start one tile ahead: the columns' constants
// (two columns a thread), which pass through shared memory, and the row statistics of x.
template <bool kPingPong, bool kPrescaledRows, typename Scheduler = TileScheduler<PingPongShape>>
class TileRows : public PlainMainloop {
 protected:
  using Shape = PingPongShape;
  using Pair = ColumnPair<false, kPrescaledRows>;
  static constexpr int kHalves = Shape::kConsumerRows<kPingPong> / 64;

 public:
  __device__ __forceinline__ TileRows(uint8_t* smem, const GemmArguments& args, const Scheduler& tiles,
                                      const CUtensorMap& y_map, int consumer, int consumer_row)
      : args_(args), tiles_(tiles), y_map_(y_map), consumer_(consumer), consumer_row_(consumer_row) {
    thread_ = threadIdx.x % 128, warp_ = thread_ / 32, lane_ = thread_ % 32;
    staging_ = shared_address(smem) + Shape::kStaging + consumer * Shape::kBoxes * kBoxBytes + warp_ * 16 * 128;
    columns_ = reinterpret_cast<Pair*>(smem + Shape::kConstants + consumer * Shape::kColumnBytes);
  }

  __device__ __forceinline__ void first(int tile) {
    prefetch_columns(tile);
    if (args_.row_stats != nullptr) griddepcontrol_wait();
    prefetch_row_stats(tile);
  }

  __device__ __forceinline__ void before(int tile) {
    row_ = tiles_.row_of(tile) + consumer_row_ + warp_ * 16, column_ = tiles_.y_column_of(tile);
    named_barrier_sync(kConsumerBarrier + consumer_, 128);  // all threads have read the previous columns
    if (thread_ < Shape::kColumns / 2) columns_[thread_] = thread_columns_;
    named_barrier_sync(kConsumerBarrier + consumer_, 128);
  }

  __device__ __forceinline__ void last() const {
    if (lane_ == 0)
      tma_store_wait_read<0>();  // before the block exits and its shared memory is freed; the end of the grid waits for
                                 // the writes
  }

 protected:
  __device__ __forceinline__ void prefetch_columns(int tile) {
    if (thread_ < Shape::kColumns / 2)
      thread_columns_ = __ldg(column_pairs<false, kPrescaledRows>(args_) + tiles_.column_of(tile) / 2 + thread_);
  }
  __device__ __forceinline__ void prefetch_row_stats(int tile) {
    if (args_.row_stats == nullptr) return;
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
      row_stats_[half].load(args_, tiles_.row_of(tile) + consumer_row_ + half * 64 + warp_ * 16, lane_);
  }
  // Scales of the current tile's rows, times `factor`.
  __device__ __forceinline__ void compute_row_scales(float factor, float2 (&scale)[kHalves][2]) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      scale[half][0] = scale[half][1] = float2{factor, 0.0f};
      if (args_.row_stats != nullptr) row_stats_[half].scales(args_, factor, lane_, scale[half]);
    }
  }

  const GemmArguments& args_;
  const Scheduler& tiles_;
  const CUtensorMap& y_map_;
  int consumer_, consumer_row_, thread_, warp_, lane_;
  int row_, column_;  // of this warp, in the current tile
  uint32_t staging_;
  Pair* columns_;
  Pair thread_columns_ = {};
  RowStats row_stats_[kHalves];
};

// The epilogue that stores rows of y.
template <typename T, Activation kActivation, bool kPingPong, bool kPrescaledRows,
          typename Scheduler = TileScheduler<PingPongShape>>
class StoreEpilogue : public TileRows<kPingPong, kPrescaledRows, Scheduler> {
  using Base = TileRows<kPingPong, kPrescaledRows, Scheduler>;
  using Shape = PingPongShape;
  using Base::kHalves, Base::lane_, Base::tiles_, Base::columns_, Base::staging_, Base::row_, Base::column_;

 public:
  using Base::Base;

  __device__ __forceinline__ void after(const float (&c)[kHalves][Shape::kColumns / 2], int /* ordinal */, int next) {
    float2 scale[kHalves][2];
    this->compute_row_scales(activation_factor(kActivation), scale);
    if (next < tiles_.end) {
      this->prefetch_columns(next);
      this->prefetch_row_stats(next);
    }
    // 16 rows a warp and 64 columns at a time. A warp scheduler has one warp here, which stalls on every result that
    // it needs. So the instructions of a whole box are independent of each other.
#pragma unroll
    for (int box = 0; box < Shape::kColumns / 64; ++box) {
      typename Base::Pair column_constants[8];  // of columns 8i + 2 · (lane % 4) and the next
#pragma unroll
      for (int i = 0; i < 8; ++i) column_constants[i] = columns_[box * 32 + i * 4 + lane_ % 4];
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const uint32_t box_at = staging_ + (box * kHalves + half) % Shape::kBoxes * kBoxBytes;
        uint32_t packed[4][4];  // 16 columns each, as two m16n8 accumulators with rows 0-7 and 8-15
        float2 none;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int element = 32 * box + 2 * i;
          packed[i / 4][i % 4] = finish<T, kActivation, false, kPrescaledRows>(
              c[half][element], c[half][element + 1], column_constants[i / 2], scale[half][i % 2], 0, 0, true, none);
        }
        wait_for_box<Shape::kBoxes - 1>(lane_);
#pragma unroll
        for (int i = 0; i < 4; ++i) stmatrix_x4(box_at + swizzle_128b(lane_ % 16, 2 * i + lane_ / 16), packed[i]);
        store_box(this->y_map_, box_at, column_ + box * 64, row_ + half * 64, lane_);
      }
    }
  }
};

}  // namespace embert::sm90
