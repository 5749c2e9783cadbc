// Row statistics, through which a LayerNorm passes from one GEMM to the next (EPILOGUES.md): how an epilogue reads
// those of its input rows and writes those of its output rows. ops/row_stats.cuh defines the order of additions, so a
// row's bits depend neither on the tile that wrote it nor on the tile that reads it.
#pragma once

#include <type_traits>

#include "gemm/epilogue/arguments.cuh"
#include "ops/row_stats.cuh"

namespace embert::sm90 {

// Reads the scale of a row in the small M kernels: there the statistics have up to four parts a group. Two adjacent
// lanes take a row's even and odd groups, and both get its scale. All loads are in flight before the first is used.
__device__ __forceinline__ float2 scale_of_pair(const GemmArguments& args, int row, int rows, int odd, float factor) {
  const int groups = (args.width + kStatColumns - 1) / kStatColumns;
  const float2* const from = args.row_stats + size_t(row) * groups * args.splits;
  const int width =
      row < rows ? args.width : 0;  // a row's last group may be narrower; parts past its end are not written
  float2 parts[4][8];
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int group = odd + i / 8 * 2, part = i % 8;
    const bool written = (part == 0 || part < args.splits) && group * kStatColumns + part * args.split_columns < width;
    parts[i / 8][part] = float2{0.0f, 0.0f};
    if (written) parts[i / 8][part] = from[group * args.splits + part];
  }
  const auto with_lane_neighbor = [](float2 sum) { return sum + shuffle_xor_pair(sum, 1); };
  const float2 low = with_lane_neighbor(tree(parts[0]) + tree(parts[2]));  // groups 0 and 4, 1 and 5
  const float2 high = with_lane_neighbor(tree(parts[1]) + tree(parts[3]));
  return row_scale(low + high, args.inverse_width, args.mean_scale, args.epsilon, factor);
}

// Reads the scales of rows in the kernels for many rows: there the statistics usually have one part a group. A lane
// reads groups lane % 4 and lane % 4 + 4 of its two rows, and the loads may stay in flight while a tile is
// multiplied. If there are more parts (many rows of a narrow GEMM), they are added immediately.
struct RowStats {
  float2 group_sums[2][2];  // of the rows lane / 4 and lane / 4 + 8

  // Rows past the end are read as the last row; their results are not stored.
  __device__ __forceinline__ void load(const GemmArguments& args, int first_row, int lane) {
    const int groups = (args.width + kStatColumns - 1) / kStatColumns;
    const auto group_at = [&](int i) { return min(lane % 4 + i % 2 * 4, groups - 1); };
    const auto parts_at = [&](int i) {
      const int row = min(first_row + lane / 4 + i / 2 * 8, args.m - 1);
      return args.row_stats + size_t(row * groups + group_at(i)) * args.splits;
    };
#pragma unroll
    for (int i = 0; i < 4; ++i) group_sums[i / 2][i % 2] = *parts_at(i);
    if (args.splits > 1) {
#pragma unroll 1  // rare, so its code stays small
      for (int i = 0; i < 4; ++i) {
        const float2 sum = group_sum(parts_at(i), args.splits, args.width - group_at(i) * kStatColumns);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (i == k) group_sums[k / 2][k % 2] = sum;
        }
      }
    }
  }

  __device__ __forceinline__ void scales(const GemmArguments& args, float factor, int lane, float2 (&scales)[2]) const {
    const float2 none = {0.0f, 0.0f};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 sum = (lane % 4 * kStatColumns < args.width ? group_sums[half][0] : none) +
                   ((lane % 4 + 4) * kStatColumns < args.width ? group_sums[half][1] : none);
#pragma unroll
      for (int step = 1; step < 4; step *= 2) sum = sum + shuffle_xor_pair(sum, step);
      scales[half] = row_scale(sum, args.inverse_width, args.mean_scale, args.epsilon, factor);
    }
  }
};

// Adds the sums of kChunks adjacent groups of 16 columns. Each of a row's four lanes holds a part of every sum. Every
// lane gets the total in chunks[0]. Each group is summed over the lanes first, then the groups as a balanced tree, so
// that tiles of any width give the same bits. The lanes share the work: each keeps half of the groups and sends the
// other half to its partner.
template <int kChunks>
__device__ __forceinline__ void combine_chunks(float2 (&chunks)[kChunks], int lane) {
  const auto add = [](float2& to, float2 value) { to = to + value; };
  const auto halve = [&](auto count, int step) {
    constexpr int kHalf = decltype(count)::value / 2;
    const bool upper = (lane & step) != 0;
    if constexpr (kHalf == 0) {
      add(chunks[0], shuffle_xor_pair(chunks[0], step));
    } else {
#pragma unroll
      for (int k = 0; k < kHalf; ++k) {
        const float2 sent = upper ? chunks[k] : chunks[k + kHalf];
        chunks[k] = upper ? chunks[k + kHalf] : chunks[k];
        add(chunks[k], shuffle_xor_pair(sent, step));
      }
    }
  };
  halve(std::integral_constant<int, kChunks>(), 2);
  halve(std::integral_constant<int, (kChunks > 1 ? kChunks / 2 : 1)>(), 1);
  if constexpr (kChunks == 8) add(chunks[0], chunks[1]);
  if constexpr (kChunks >= 4) add(chunks[0], shuffle_xor_pair(chunks[0], 1));
  if constexpr (kChunks >= 2) add(chunks[0], shuffle_xor_pair(chunks[0], 2));
}

// Writes the sums of this lane's two rows over kColumns columns, from those of their groups of 16 columns.
template <int kColumns, int kChunks>
__device__ __forceinline__ void store_row_stats(const GemmArguments& args, float2 (&sums)[2][kChunks], int rows,
                                                int first_row, int column, int lane) {
  static_assert(kColumns == kChunks * 16 && kColumns <= kStatColumns, "a part of a group, or a group");
  const int pitch = (args.n + kStatColumns - 1) / kStatColumns * (kStatColumns / kColumns);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    combine_chunks(sums[half], lane);
    if (lane % 4 == 0 && first_row + 8 * half < rows && column < args.n)
      args.y_stats[size_t(first_row + 8 * half) * pitch + column / kColumns] = sums[half][0];
  }
}

}  // namespace embert::sm90
