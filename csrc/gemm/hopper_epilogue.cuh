// What the products for many and for few rows do after multiplying, the same to the bit (../EPILOGUES.md): two elements
// of y, and the sums through which LayerNorms pass from one product to the next: how an epilogue reads those of its
// rows, and how it leaves those of what it writes. The order of additions is that of ../kernels/row_sums.cuh
// everywhere, so a row's bits depend neither on the tile that wrote it nor on the one that reads it.
#pragma once

#include <type_traits>

#include "../kernels/activation.cuh"
#include "../kernels/row_sums.cuh"
#include "hopper.cuh"

namespace embert::hopper {

// What an epilogue reads of two neighbouring columns (fold.cuh): (c, c), or where gamma is in the rows (s, c, s, c), or
// with a residual (γ, b, γ, b).
template <bool kResidual, bool kGammaInRows>
using ColumnPair = std::conditional_t<kResidual || kGammaInRows, float4, float2>;

// What the epilogue needs beside the tensor maps.
struct GemmArguments {
  const void* columns;     // a ColumnPair each two
  const void* residual;    // [rows, out]; many rows take it through a tensor map
  const void* next_gamma;  // [out] of T: y's; where gamma is in the rows and there is a residual
  void* y;                 // [rows, out], likewise
  const float2* row_sums;  // of x's rows, or of the residual's; null: they are normalised already
  float2* y_sums;          // null: not wanted
  int parts;               // of row_sums, a group
  int part_columns;        // a part's
  int width;               // columns of the rows that row_sums are of
  float inverse_width;
  float epsilon;
  int rows, out, in;
  const uint8_t* ahead;  // LinearWeights::ahead; few rows only
  int ahead_lines;       // of 128 bytes; 0: none
  bool backwards;        // the last rows first; many rows only
  // 2³¹ over the number of tiles across y, rounded up: a tile's row without a division, exact for fewer than 2³¹ over
  // that number of tiles; many rows only.
  uint32_t columns_inverse;
};

template <bool kResidual, bool kGammaInRows>
__device__ __forceinline__ const ColumnPair<kResidual, kGammaInRows>* column_pairs(const GemmArguments& of) {
  return static_cast<const ColumnPair<kResidual, kGammaInRows>*>(of.columns);
}
__device__ __forceinline__ const uint32_t* next_gamma_pairs(const GemmArguments& of) {
  return static_cast<const uint32_t*>(of.next_gamma);
}

// Both ways to read a row's sums add them up in the order of row_sums.cuh: its scale has the same bits in any tile.
//
// For few rows, whose producers leave up to four parts a group: two neighbouring lanes share a row, its even and its
// odd groups, and both get its scale. All loads are on their way before the first is used.
__device__ __forceinline__ float2 scale_of_pair(const GemmArguments& of, int row, int rows, int odd, float factor) {
  const int groups = (of.width + kSumColumns - 1) / kSumColumns;
  const float2* const from = of.row_sums + size_t(row) * groups * of.parts;
  const int width =
      row < rows ? of.width : 0;  // a row's last group may be narrower; parts past the end were never written
  float2 parts[4][8];
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int group = odd + i / 8 * 2, part = i % 8;
    const bool written = (part == 0 || part < of.parts) && group * kSumColumns + part * of.part_columns < width;
    parts[i / 8][part] = float2{0.0f, 0.0f};
    if (written) parts[i / 8][part] = from[group * of.parts + part];
  }
  const auto tree = [](const float2(&p)[8]) {
    return ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]));
  };
  const auto with_neighbour = [](float2 sum) {
    return sum + float2{__shfl_xor_sync(~0u, sum.x, 1), __shfl_xor_sync(~0u, sum.y, 1)};
  };
  const float2 low = with_neighbour(tree(parts[0]) + tree(parts[2]));  // groups 0 and 4, 1 and 5
  const float2 high = with_neighbour(tree(parts[1]) + tree(parts[3]));
  return row_scale(low + high, of.inverse_width, of.epsilon, factor);
}

// For many rows, whose producers leave one part a group: a lane reads groups lane % 4 and lane % 4 + 4 of its own two
// rows, and they may stay in flight while a tile is multiplied. More parts (many rows of a narrow product's) are added
// at once.
struct ManyRowsSums {
  float2 held[2][2];  // of the rows lane / 4 and lane / 4 + 8

  // Rows past the end are read as the last one: nobody stores what becomes of them.
  __device__ __forceinline__ void load(const GemmArguments& of, int first_row, int lane) {
    const int groups = (of.width + kSumColumns - 1) / kSumColumns;
    const auto group_at = [&](int i) { return min(lane % 4 + i % 2 * 4, groups - 1); };
    const auto parts_at = [&](int i) {
      const int row = min(first_row + lane / 4 + i / 2 * 8, of.rows - 1);
      return of.row_sums + size_t(row * groups + group_at(i)) * of.parts;
    };
#pragma unroll
    for (int i = 0; i < 4; ++i) held[i / 2][i % 2] = *parts_at(i);
    if (of.parts > 1) {
#pragma unroll 1  // rare: its code should stand in nobody's way
      for (int i = 0; i < 4; ++i) {
        const float2 sum = group_sum(parts_at(i), of.parts, of.width - group_at(i) * kSumColumns);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (i == k) held[k / 2][k % 2] = sum;
        }
      }
    }
  }

  __device__ __forceinline__ void scales(const GemmArguments& of, float factor, int lane, float2 (&scales)[2]) const {
    const float2 none = {0.0f, 0.0f};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 sum = (lane % 4 * kSumColumns < of.width ? held[half][0] : none) +
                   ((lane % 4 + 4) * kSumColumns < of.width ? held[half][1] : none);
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

// The sums of this lane's two rows over a tile's or part's kColumns columns, from those of its 16-column pieces.
template <int kColumns, int kChunks>
__device__ __forceinline__ void leave_sums(const GemmArguments& of, float2 (&sums)[2][kChunks], int rows, int first_row,
                                           int column, int lane) {
  static_assert(kColumns == kChunks * 16 && kColumns <= kSumColumns, "a part of a group, or a group");
  const int pitch = (of.out + kSumColumns - 1) / kSumColumns * (kSumColumns / kColumns);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    combine_chunks(sums[half], lane);
    if (lane % 4 == 0 && first_row + 8 * half < rows && column < of.out)
      of.y_sums[size_t(first_row + 8 * half) * pitch + column / kColumns] = sums[half][0];
  }
}

// Two neighbouring elements of y from their products. `k`: their columns' constants; `by`: the row's scale and shift;
// `next`: what a residual's y is multiplied with where gamma is in the rows; `sum`: of the row's 16 columns, begun with
// the `first` of a lane's two pairs.
template <typename T, Activation kActivation, bool kResidual, bool kGammaInRows>
__device__ __forceinline__ uint32_t finish(float low, float high, ColumnPair<kResidual, kGammaInRows> k, float2 by,
                                           uint32_t residual, uint32_t next, bool first, float2& sum) {
  if constexpr (kResidual) {
    const float2 rest = unpack_two<T>(residual);
    if constexpr (kGammaInRows) {
      low = fmaf(rest.x, by.x, fmaf(k.x, by.y, low + k.y));
      high = fmaf(rest.y, by.x, fmaf(k.z, by.y, high + k.w));
    } else {
      low = fmaf(fmaf(rest.x, by.x, by.y), k.x, low + k.y);
      high = fmaf(fmaf(rest.y, by.x, by.y), k.z, high + k.w);
    }
    const float2 two = {low + high, fmaf(low, low, high * high)};
    sum = first ? two : sum + two;
    if constexpr (kGammaInRows) {
      const float2 gamma = unpack_two<T>(next);
      low *= gamma.x, high *= gamma.y;
    }
  } else if constexpr (kGammaInRows) {
    low = activate<kActivation, false>(fmaf(low, by.x, fmaf(k.x, by.y, k.y)));
    high = activate<kActivation, false>(fmaf(high, by.x, fmaf(k.z, by.y, k.w)));
  } else {
    low = activate<kActivation, false>(fmaf(low, by.x, k.x));
    high = activate<kActivation, false>(fmaf(high, by.x, k.y));
  }
  return pack_two<T>(low, high);
}

}  // namespace embert::hopper
