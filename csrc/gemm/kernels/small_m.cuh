// The small M GEMM: y[rows, out] = activation(x[rows, in] · W[out, in]ᵀ + bias (+ residual)) on Hopper for few rows,
// where only latency counts: a launch takes two or three microseconds.
//
// A block has one tile: 16, 32 or 64 rows, and as many columns as its shape has. One warp is the producer, four
// multiply, and four read the row statistics and prefetch weights of a later GEMM into the L2 cache. Against latency:
//   - Loads of W start before the earlier kernel ends, those of x as soon as it has ended. One elected lane loads a
//     whole stage with one instruction. One lane per box takes 40 ns a box.
//   - The next kernel may start when the loads of x have started, not before: otherwise weights for the kernel after it
//     would delay x.
//   - A stage is 128 columns of K, with int8 256. Whether the next one is full is tested before the products of this
//     one, so that the result is ready when it is needed.
//   - A tile has fewer rows than wgmma's 64 where that leaves more multiprocessors to load x and W. wgmma still reads
//     64 rows: rows past the tile are arbitrary shared memory, and their results are not stored.
//   - Two blocks fit on a multiprocessor, so that the next kernel's blocks start before this kernel's blocks end.
// Accumulation, epilogue and row statistics have the same bits as the kernels for many rows. The pipeline is that of
// pipeline.cuh, without clusters, and with its own addresses.
#pragma once

#include <algorithm>

#include "common/barrier.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/shared_memory.cuh"
#include "common/tma.cuh"
#include "common/warp.cuh"
#include "gemm/epilogue/finish.cuh"
#include "gemm/epilogue/row_stats.cuh"
#include "gemm/heuristics.h"

namespace embert::sm90 {

template <int kColumnsValue>
struct SmallMShape {
  static constexpr int kColumns = kColumnsValue;  // of y
  static constexpr int kRows = 64;                // at most; wgmma's M
  static constexpr int kBoxes = 2;                // of 64 columns of K, a stage; with int8 of 128
  static constexpr int kWBoxBytes = kColumns * 128;
  static constexpr int kMaxStages = 16;
  static_assert(kColumns == 32 || kColumns == 64, "the widths that common/mma.cuh wraps");

  static constexpr int stage_bytes(int x_rows) { return kBoxes * (x_rows * 128 + kWBoxBytes); }
  // Stages with two barriers each, and the rows' scales. The rows that wgmma reads past the last rows of x have to lie
  // in the block's shared memory too.
  static constexpr int shared_bytes(int stages, int x_rows) {
    const int used = stages * (stage_bytes(x_rows) + 16) + kRows * 8, read = (stages * kBoxes * x_rows + kRows) * 128;
    return used > read ? used : read;
  }
};

using SmallM64 = SmallMShape<64>;
using SmallM32 = SmallMShape<32>;

// Stages of a block: at most the steps of K, at most what fits.
template <typename Shape>
int small_m_stages(int rows, int x_rows, int stages_needed, int blocks, int num_sms) {
  const int shared_limit = rows > Shape::kRows && blocks <= num_sms ? kSmallMMaxBytes : kSmallMBytes;
  const int fitting = (shared_limit - Shape::shared_bytes(0, x_rows)) / (Shape::stage_bytes(x_rows) + 16);
  return std::min({stages_needed, Shape::kMaxStages, fitting});
}

constexpr int kSmallMMathThreads = 128, kSmallMTmaThreads = 32,
              kSmallMScaleThreads = 128;  // threads of each role, in this order
constexpr int kSmallMThreads = kSmallMMathThreads + kSmallMTmaThreads + kSmallMScaleThreads;
// Up to this many rows the next kernel may launch when the loads of the first stages of x have started. With more rows
// it may launch when all loads of x have started, because the next kernel's W would delay x. BERT-base, µs per forward
// pass, with the first and the second rule: 256 rows 357 and 366, 512 rows 553 and 523.
constexpr int kEarlyRows = 256;

// Position of a lane's pairs of columns.
struct SmallMPosition {
  int row, rows;     // the lane's first row; the end of the block's rows
  int column, lane;  // the tile's first column
};

// The default epilogue of a pair of columns, as finish.cuh; rope.cuh and gated.cuh have others. `Operands` is what
// `pair` reads of the rows: `prefetch` may load it before the products, `load_chunk` before each 16 columns.
template <typename T, Activation kActivation, bool kResidualValue, bool kPrescaledRowsValue>
struct SmallMStored {
  static constexpr bool kResidual = kResidualValue, kPrescaledRows = kPrescaledRowsValue, kGates = false;
  static constexpr float kFactor = activation_factor(kActivation);
  struct Operands {};
  __device__ __forceinline__ void prefetch(const SmallMPosition&, Operands&) const {}
  __device__ __forceinline__ void load_chunk(const SmallMPosition&, int /* chunk */, Operands&) const {}
  __device__ __forceinline__ uint32_t pair(float low, float high, ColumnPair<kResidual, kPrescaledRows> k,
                                           float2 scale_shift, uint32_t residual, uint32_t next, bool first,
                                           float2& sum, const Operands&, int /* index */) const {
    return finish<T, kActivation, kResidual, kPrescaledRows>(low, high, k, scale_shift, residual, next, first, sum);
  }
};

// Runs a block, for all of its threads.
template <typename T, typename Shape, typename Epilogue>
__device__ __forceinline__ void small_m_tile(const CUtensorMap& x_map, const CUtensorMap& w_map,
                                             const GemmArguments& args, int x_rows, int stages,
                                             const Epilogue& epilogue) {
  constexpr bool kResidual = Epilogue::kResidual, kPrescaledRows = Epilogue::kPrescaledRows;
  extern __shared__ __align__(1024) uint8_t smem[];  // [stages][boxes] of x, the same of W, barriers, scales
  const int x_box = x_rows * 128;
  const int all_x = stages * Shape::kBoxes * x_box, all_w = stages * Shape::kBoxes * Shape::kWBoxBytes;
  const uint32_t x_at = shared_address(smem), w_at = x_at + all_x;
  const uint32_t full = w_at + all_w, empty = full + 8 * stages;
  float2* const scales = reinterpret_cast<float2*>(smem + all_x + all_w + 16 * stages);  // one per row
  const int warp = warp_index(), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s) {
      mbarrier_init(full + 8 * s, 1);
      mbarrier_init(empty + 8 * s, 4);
    }
    fence_mbarrier_init();
  }
  __syncthreads();

  constexpr int kDepth = Shape::kBoxes * kDepthOf<T>;
  const int steps = (args.k + kDepth - 1) / kDepth;  // half a stage past K is filled with zeros
  const int row = blockIdx.y * x_rows, column = blockIdx.x * Shape::kColumns;
  const int rows = min(args.m, row + x_rows);  // the end of this block's rows
  if (warp == 4) {
    const int x_stage = Shape::kBoxes * x_box, w_stage = Shape::kBoxes * Shape::kWBoxBytes;
    const auto load_x = [&](int step, int stage) {
      tma_load_3d(&x_map, x_at + stage * x_stage, full + 8 * stage, step * Shape::kBoxes, row);
    };
    const auto load_w = [&](int step, int stage) {
      tma_load_3d(&w_map, w_at + stage * w_stage, full + 8 * stage, step * Shape::kBoxes, column);
    };
    const int early = min(steps, stages);
    if (lane < early) mbarrier_arrive_expect_tx(full + 8 * lane, x_stage + w_stage);
    __syncwarp();
    if (!elect_one()) return;
#pragma unroll 2
    for (int step = 0; step < early; ++step) load_w(step, step);
    griddepcontrol_wait();
#pragma unroll 2
    for (int step = 0; step < early; ++step) load_x(step, step);
    if (args.m <= kEarlyRows) griddepcontrol_launch_dependents();
#pragma unroll 1
    for (int step = early, stage = 0, phase = 0; step < steps; ++step) {
      mbarrier_wait(empty + 8 * stage, phase);
      mbarrier_arrive_expect_tx(full + 8 * stage, x_stage + w_stage);
      load_x(step, stage);
      load_w(step, stage);
      if (++stage == stages) stage = 0, phase ^= 1;
    }
    if (args.m > kEarlyRows) griddepcontrol_launch_dependents();
    return;
  }
  static_assert(kSmallMScaleThreads == 2 * Shape::kRows, "two threads a row");
  if (warp > 4) {
    const int i = threadIdx.x - kSmallMMathThreads - kSmallMTmaThreads;
    griddepcontrol_wait();
    if (args.row_stats != nullptr) {
      const float2 scale = scale_of_pair(args, row + i / 2, rows, i % 2, Epilogue::kFactor);
      if (i % 2 == 0) scales[i / 2] = scale;
      named_barrier_arrive(kScalesBarrier, kSmallMScaleThreads + kSmallMMathThreads);
    }
    const int block = blockIdx.y * gridDim.x + blockIdx.x, all = gridDim.x * gridDim.y * kSmallMScaleThreads;
#pragma unroll 1
    for (int line = block * kSmallMScaleThreads + i; line < args.prefetch_lines; line += all)
      prefetch_l2(args.prefetch_weights + line * 128);
    return;
  }

  // Loads for the epilogue are in flight during the products.
  constexpr int kChunks = Shape::kColumns / 16;
  ColumnPair<kResidual, kPrescaledRows> columns[kChunks][2];
  uint32_t next_gammas[kChunks][2] = {};
#pragma unroll
  for (int i = 0; i < 2 * kChunks; ++i) {
    const int pair = column / 2 + lane % 4 + i * 4;
    columns[i / 2][i % 2] = __ldg(column_pairs<kResidual, kPrescaledRows>(args) + pair);
    if constexpr (kResidual && kPrescaledRows) next_gammas[i / 2][i % 2] = __ldg(next_gamma_pairs(args) + pair);
  }
  const int first_row = row + warp * 16 + lane / 4, first_column = column + 2 * (lane % 4);
  // The four registers of an m16n16: (rows 0-7, columns 0-7), (rows 8-15, columns 0-7), then columns 8-15.
  const auto is_inside = [&](int chunk, int i) {
    return first_row + 8 * (i % 2) < rows && first_column + chunk * 16 + 8 * (i / 2) < args.n;
  };
  const auto place = [&](int chunk, int i) {
    return size_t(first_row + 8 * (i % 2)) * args.n + first_column + chunk * 16 + 8 * (i / 2);
  };
  uint32_t residuals[kResidual ? kChunks : 1][4] = {};
  if constexpr (kResidual) {
    griddepcontrol_wait();
#pragma unroll
    for (int i = 0; i < kChunks * 4; ++i) {
      const auto* const residual = static_cast<const RowType<T>*>(args.residual) + place(i / 4, i % 4);
      if (is_inside(i / 4, i % 4)) residuals[i / 4][i % 4] = *reinterpret_cast<const uint32_t*>(residual);
    }
  }
  typename Epilogue::Operands operands;
  epilogue.prefetch({first_row, rows, column, lane}, operands);

  SumOf<T> c[Shape::kColumns / 2];
  uint64_t x_operand = make_descriptor(x_at), w_operand = make_descriptor(w_at);
  bool is_full = false;
#pragma unroll 1
  for (int step = 0, stage = 0, phase = 0; step < steps; ++step) {
    if (!is_full) mbarrier_wait(full + 8 * stage, phase);
    const int earlier = stage == 0 ? stages - 1 : stage - 1;
    if (++stage == stages) stage = 0, phase ^= 1;
    // Tested before the products: the result takes as long as five of them.
    is_full = mbarrier_test_wait(full + 8 * stage, phase);
    wgmma_fence();
#pragma unroll
    for (int box = 0; box < Shape::kBoxes; ++box) {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma<T>(c, advance_descriptor(x_operand, box * x_box + k * 32),
                 advance_descriptor(w_operand, box * Shape::kWBoxBytes + k * 32), step + box + k > 0);
    }
    wgmma_commit();
    x_operand = stage == 0 ? make_descriptor(x_at) : advance_descriptor(x_operand, Shape::kBoxes * x_box);
    w_operand = stage == 0 ? make_descriptor(w_at) : advance_descriptor(w_operand, Shape::kBoxes * Shape::kWBoxBytes);
    if (step > 0 && step - 1 + stages < steps) {
      wgmma_wait<1>();  // the stage before this one has been read
      if (lane == 0) mbarrier_arrive(empty + 8 * earlier);
    }
  }
  wgmma_wait_all(c);

  float2 scale[2];
  scale[0] = scale[1] = unnormed<kResidual, kPrescaledRows>(Epilogue::kFactor);
  if (args.row_stats != nullptr) {
    named_barrier_sync(kScalesBarrier, kSmallMScaleThreads + kSmallMMathThreads);
#pragma unroll
    for (int half = 0; half < 2; ++half) scale[half] = scales[warp * 16 + lane / 4 + 8 * half];
  }
  if constexpr (Epilogue::kGates) {
    epilogue.store(args, {first_row, rows, column, lane}, c, columns, scale);
  } else {
    float2 sums[2][kChunks];
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      epilogue.load_chunk({first_row, rows, column, lane}, chunk, operands);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int element = 8 * chunk + 4 * (i / 2) + 2 * (i % 2);
        const uint32_t two = epilogue.pair(c[element], c[element + 1], columns[chunk][i / 2], scale[i % 2],
                                           residuals[kResidual ? chunk : 0][i], next_gammas[chunk][i / 2], i < 2,
                                           sums[i % 2][chunk], operands, 4 * chunk + i);
        if (is_inside(chunk, i)) *reinterpret_cast<uint32_t*>(static_cast<RowType<T>*>(args.y) + place(chunk, i)) = two;
      }
    }
    if constexpr (kResidual) {
      if (args.y_stats != nullptr) store_row_stats<Shape::kColumns>(args, sums, rows, first_row, column, lane);
    }
  }
}

template <typename T, typename Shape, Activation kActivation, bool kResidual, bool kPrescaledRows>
__global__ void __launch_bounds__(kSmallMThreads, 2)
    small_m_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                   const GemmArguments args, int x_rows, int stages) {
  EMBERT_SM90A("small_m_kernel", small_m_tile<T, Shape>(x_map, w_map, args, x_rows, stages,
                                                        SmallMStored<T, kActivation, kResidual, kPrescaledRows>()));
}

}  // namespace embert::sm90
