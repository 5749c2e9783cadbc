// maxima[text, column] on Hopper: the ping-pong main loop with an epilogue that stores no product: only the maxima over
// each text's rows go to memory (EPILOGUES.md). A decoder has 30 522 columns, or hundreds of thousands: W
// does not stay in the L2 cache, so tiles come in bands.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/launch.cuh"
#include "common/numeric.cuh"
#include "common/shared_memory.cuh"
#include "gemm/gemm.h"
#include "gemm/mainloop/pingpong.cuh"

namespace embert::sm90 {

// Kernel arguments in addition to the tensor maps.
struct MaximaArguments {
  const float* bias;   // [whole tiles of columns]
  const int* text_of;  // TextRows
  float* maxima;       // [texts, pitch]
  int pitch;
  int first_row, end_row, first_text;  // TextRows: of x, of the batch
  int out, in;
  int band;  // columns of a band, in tiles (BandedTileScheduler)
};

// The maximum over a warp's eight rows of lanes, for 64 columns. A lane holds those of eight m16n8 accumulators: 8j +
// 2 · (lane % 4) and the next. Afterwards `low` and `high` are of columns 2 · lane and the next. The lanes share the
// work: each keeps half of its columns and sends the other half to its partner.
__device__ __forceinline__ void largest_of_lanes(float (&columns)[16], int lane, float& low, float& high) {
  const auto halve = [&](auto half, int step) {
    constexpr int kHalf = decltype(half)::value;
    const bool upper = (lane & step) != 0;
#pragma unroll
    for (int k = 0; k < kHalf; ++k) {
      const float sent = upper ? columns[k] : columns[k + kHalf];
      const float own = upper ? columns[k + kHalf] : columns[k];
      columns[k] = larger(own, __shfl_xor_sync(~0u, sent, step));
    }
  };
  halve(std::integral_constant<int, 8>(), 16);
  halve(std::integral_constant<int, 4>(), 8);
  halve(std::integral_constant<int, 2>(), 4);
  low = columns[0], high = columns[1];
}

// Positive floats have the order of their bits. Values that are not positive change nothing, because maxima begin
// with 0; the bits of a NaN are larger than infinity's.
__device__ __forceinline__ void raise(float* maximum, float value) {
  const int bits = __float_as_int(value);
  if (bits > 0) atomicMax(reinterpret_cast<int*>(maximum), bits);
}

// The banded tile scheduler: bands of columns, one after another. A band iterates over all rows, and for each over all
// of its columns. So W is read from memory once, x once a band, and all other reads hit the L2 cache. A tile takes
// thousands of cycles, so the cost of its divisions does not matter.
template <typename Shape>
struct BandedTileScheduler {
  int rows, columns, band;  // in tiles of a cluster
  int first_row;            // of x
  int first, stride, end;
  int rank;  // of the block in its cluster

  __device__ __forceinline__ explicit BandedTileScheduler(const MaximaArguments& args)
      : band(args.band), first_row(args.first_row) {
    rank = cluster_rank();
    columns = (args.out + Shape::kColumns - 1) / Shape::kColumns;
    rows = (args.end_row - args.first_row + Shape::kRows * kCluster - 1) / (Shape::kRows * kCluster);
    first = blockIdx.x / kCluster;
    stride = gridDim.x / kCluster;
    end = columns * rows;
  }
  __device__ __forceinline__ int row_of(int tile) const {
    return first_row + (place_of(tile).row * kCluster + rank) * Shape::kRows;
  }
  __device__ __forceinline__ int column_of(int tile) const { return place_of(tile).column * Shape::kColumns; }
  __device__ __forceinline__ static constexpr int columns_of(int /* any tile */) { return Shape::kColumns; }

 private:
  struct Position {
    int row, column;  // in tiles
  };
  __device__ __forceinline__ Position place_of(int tile) const {
    const int before = uint32_t(tile) / uint32_t(rows * band) * band;  // columns of earlier bands
    const uint32_t width = min(band, columns - before), in_band = tile - before * rows;
    return {int(in_band / width), before + int(in_band % width)};
  }
};

// The maxima epilogue (pingpong.cuh). Each warp iterates over the texts of its 16 rows, usually one. The bias is
// added to the largest product: rounding is monotonic, so the bits are those of the largest sum.
class MaximaEpilogue : public PlainMainloop {
  using Shape = PingPongShape;
  using Scheduler = BandedTileScheduler<Shape>;
  static constexpr int kHalves = Shape::kConsumerRows<true> / 64, kBoxes = Shape::kColumns / 64;

 public:
  __device__ __forceinline__ MaximaEpilogue(const MaximaArguments& args, const Scheduler& tiles, int consumer_row)
      : args_(args),
        tiles_(tiles),
        lane_(threadIdx.x % 32),
        consumer_row_(consumer_row + threadIdx.x % 128 / 32 * 16) {}

  __device__ __forceinline__ void first(int /* tile */) const { griddepcontrol_wait(); }

  // Loads are in flight while the tile is multiplied.
  __device__ __forceinline__ void before(int tile) {
    column_ = tiles_.column_of(tile);
    const int row = tiles_.row_of(tile) + consumer_row_ + lane_ / 4;
#pragma unroll
    for (int i = 0; i < 2 * kHalves; ++i) {
      const int text_row = row + i / 2 * 64 + i % 2 * 8;
      texts_[i / 2][i % 2] = text_row < args_.end_row ? __ldcg(args_.text_of + text_row) : kNoText;
    }
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      bias_[box] = __ldg(reinterpret_cast<const float2*>(args_.bias + column_ + box * 64) + lane_);
  }

  __device__ __forceinline__ void after(const float (&c)[kHalves][Shape::kColumns / 2], int /* ordinal */,
                                        int /* next */) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int upper = texts_[half][0], lower = texts_[half][1];  // of rows lane / 4 and lane / 4 + 8
      const int last = __reduce_max_sync(~0u, max(upper, lower));
      if (last == kNoText) continue;
      const int first = __reduce_min_sync(~0u, min(uint32_t(upper), uint32_t(lower)));  // kNoText is the largest
#pragma unroll 1
      for (int text = first; text <= last; ++text) {
        float* const row = args_.maxima + size_t(text - args_.first_text) * args_.pitch + column_ + 2 * lane_;
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) {
          float columns[16], low, high;
#pragma unroll
          for (int i = 0; i < 16; ++i) {
            const int element = 32 * box + i / 2 * 4 + i % 2;
            columns[i] =
                larger(text == upper ? c[half][element] : -INFINITY, text == lower ? c[half][element + 2] : -INFINITY);
          }
          largest_of_lanes(columns, lane_, low, high);
          raise(row + box * 64, low + bias_[box].x);
          raise(row + box * 64 + 1, high + bias_[box].y);
        }
      }
    }
  }

  __device__ __forceinline__ void last() const {}

 private:
  const MaximaArguments& args_;
  const Scheduler& tiles_;
  int lane_, consumer_row_, column_;
  int texts_[kHalves][2];
  float2 bias_[kBoxes];
};

template <typename T>
__global__ void __launch_bounds__(PingPongShape::kThreads, 1)
    maxima_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                  const MaximaArguments args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = PingPongShape;
  using Scheduler = BandedTileScheduler<Shape>;
  static_assert(Shape::kColumns == kMaximaColumns, "maxima have whole tiles");
  extern __shared__ __align__(1024) uint8_t smem[];  // a swizzle pattern is 1 024 bytes
  if (threadIdx.x == 32) prefetch_tensor_maps(x_map, w_map);
  init_pingpong<true>(shared_address(smem));
  const Scheduler tiles(args);
  pingpong_mainloop<T, true>(shared_address(smem), tiles, args.in, x_map, w_map,
                             [&](int, int consumer_row) { return MaximaEpilogue(args, tiles, consumer_row); });
#else
  EMBERT_TRAP("maxima_kernel");
#endif
}

}  // namespace embert::sm90
