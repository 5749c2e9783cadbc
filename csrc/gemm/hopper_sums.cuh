// The sums through which LayerNorms pass from one product to the next (../EPILOGUES.md): how an epilogue reads those of
// its rows, and how it leaves those of what it writes. The order of additions is that of ../kernels/row_sums.cuh
// everywhere, so a row's bits depend neither on the tile that wrote it nor on the one that reads it.
#pragma once

#include <type_traits>

#include "../kernels/row_sums.cuh"

namespace embert::hopper {

// What the epilogue needs beside the tensor maps.
struct GemmArguments {
  const float4* columns;   // two columns each: (s, c, s, c), or with a residual (γ, b, γ, b)
  const void* residual;    // [rows, out], for tiles that are not staged
  void* y;                 // likewise
  const float2* row_sums;  // of x's rows, or of the residual's; null: they are normalised already
  float2* y_sums;          // null: not wanted
  int parts;               // of row_sums, a group
  int width;               // columns of the rows that row_sums are of
  float inverse_width;
  float epsilon;
  int rows, out, in;
  int x_bytes;  // of a stage: a box of fewer than 64 rows fetches no others
};

// The sums of a warp's 16 rows, left in flight while the tile is multiplied; both forms add them up in the order of
// row_sums.cuh, so a row's scale has the same bits in any tile.
//
// For few rows, whose producers leave eight parts a group: all lanes read every row, four a group, two parts a lane (or
// one of four, …).
struct FewRowsSums {
  float2 held[16], second[16];

  __device__ __forceinline__ void load(const GemmArguments& of, int first_row, int lane) {
    const int groups = (of.width + kSumColumns - 1) / kSumColumns, group = lane / 4;
    const int apart = of.parts < 4 ? 4 / of.parts : 1;         // lanes from one part to the next
    const int part = lane % 4 * max(of.parts, 4) / 4 / apart;  // the first of this lane's
    // A row's last group may be narrower than 128 columns; parts past the end were never written.
    const auto written = [&](int i) { return group * kSumColumns + (part + i) * (kSumColumns / of.parts) < of.width; };
    const bool has_one = lane % apart == 0 && group < groups && written(0);
    const bool has_two = of.parts == 8 && has_one && written(1);
    const float2* const from = of.row_sums + (size_t(first_row) * groups + group) * of.parts + part;
    const int pitch = groups * of.parts;
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      const bool exists = first_row + r < of.rows;
      held[r] = has_one && exists ? from[r * pitch] : float2{0.0f, 0.0f};
      second[r] = has_two && exists ? from[r * pitch + 1] : float2{0.0f, 0.0f};
    }
  }

  // Of the rows lane / 4 and lane / 4 + 8. At each of five levels lanes add up in pairs; each keeps half of the values
  // and gives the other half away, until a lane has one sum of one row.
  __device__ __forceinline__ void scales(const GemmArguments& of, float factor, int lane, float2 (&scales)[2]) {
    float values[16];
#pragma unroll
    for (int r = 0; r < 16; ++r) values[r] = exchanged(held[r].x + second[r].x, held[r].y + second[r].y, lane, 1);
    halve<16>(values, lane, 2);
    halve<8>(values, lane, 16);
    halve<4>(values, lane, 4);
    halve<2>(values, lane, 8);
    const float partner = __shfl_xor_sync(~0u, values[0], 1);
    const float2 own = row_scale(lane % 2 == 0 ? float2{values[0], partner} : float2{partner, values[0]},
                                 of.inverse_width, of.epsilon, factor);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + 8 * half;  // its bits 0 to 3 are bits 1, 4, 2, 3 of the lane that has it
      const int at = (row & 1) << 1 | (row & 2) << 3 | (row & 4) | (row & 8);
      scales[half] = {__shfl_sync(~0u, own.x, at), __shfl_sync(~0u, own.y, at)};
    }
  }

 private:
  // Lanes whose bit `step` is 0 end with the pair's sum of `low`, the others with that of `high`.
  __device__ static float exchanged(float low, float high, int lane, int step) {
    const bool upper = (lane & step) != 0;
    return (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, step);
  }
  template <int kCount>
  __device__ static void halve(float (&values)[16], int lane, int step) {
#pragma unroll
    for (int r = 0; r < kCount / 2; ++r) values[r] = exchanged(values[2 * r], values[2 * r + 1], lane, step);
  }
};

// For many rows, whose producers leave one part a group: a lane reads groups lane % 4 and lane % 4 + 4 of its own two
// rows. More parts (many rows of a narrow product's) are added at once.
struct ManyRowsSums {
  float2 held[2][2];  // of the rows lane / 4 and lane / 4 + 8

  __device__ __forceinline__ void load(const GemmArguments& of, int first_row, int lane) {
    const int groups = (of.width + kSumColumns - 1) / kSumColumns;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row + lane / 4 + i / 2 * 8, group = lane % 4 + i % 2 * 4;
      const bool exists = row < of.rows && group < groups;
      const float2* const from = of.row_sums + (size_t(row) * groups + group) * of.parts;
      held[i / 2][i % 2] = exists ? from[0] : float2{0.0f, 0.0f};
      if (of.parts > 1 && exists) held[i / 2][i % 2] = group_sum(from, of.parts, of.width - group * kSumColumns);
    }
  }

  __device__ __forceinline__ void scales(const GemmArguments& of, float factor, int, float2 (&scales)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 sum = held[half][0] + held[half][1];
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
        sum.x += __shfl_xor_sync(~0u, sum.x, step);
        sum.y += __shfl_xor_sync(~0u, sum.y, step);
      }
      scales[half] = row_scale(sum, of.inverse_width, of.epsilon, factor);
    }
  }
};

// Sums of kChunks neighbouring pieces of 16 columns, held by the four lanes of a row in part; afterwards every lane has
// the total in chunks[0]. Each piece is summed over the lanes first, then the pieces as a balanced tree: so that tiles
// of any width agree. Lanes share the work: each keeps half of the pieces and gives the other half away.
template <int kChunks>
__device__ __forceinline__ void combine_chunks(float2 (&chunks)[kChunks], int lane) {
  const auto from = [](float2 value, int step) {
    return float2{__shfl_xor_sync(~0u, value.x, step), __shfl_xor_sync(~0u, value.y, step)};
  };
  const auto add = [](float2& to, float2 value) { to = to + value; };
  const auto halve = [&](auto count, int step) {
    constexpr int kHalf = decltype(count)::value / 2;
    const bool upper = (lane & step) != 0;
    if constexpr (kHalf == 0) {
      add(chunks[0], from(chunks[0], step));
    } else {
#pragma unroll
      for (int k = 0; k < kHalf; ++k) {
        const float2 given = upper ? chunks[k] : chunks[k + kHalf];
        chunks[k] = upper ? chunks[k + kHalf] : chunks[k];
        add(chunks[k], from(given, step));
      }
    }
  };
  halve(std::integral_constant<int, kChunks>(), 2);
  halve(std::integral_constant<int, (kChunks > 1 ? kChunks / 2 : 1)>(), 1);
  if constexpr (kChunks == 8) add(chunks[0], chunks[1]);
  if constexpr (kChunks >= 4) add(chunks[0], from(chunks[0], 1));
  if constexpr (kChunks >= 2) add(chunks[0], from(chunks[0], 2));
}

}  // namespace embert::hopper
