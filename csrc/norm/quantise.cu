// Rotates and rounds rows to 8 bits: a warp or four a row, everything between load and store in registers.
//
// Floor for 16 384 rows of 1 024: x read and q written, 50 MB, 17 µs at 3 TB/s (28 are measured; 70.7 of 67 where rows
// have 4 096 columns). Of a block of 128 columns, 16 lanes hold 8 each: three stages of the butterfly are in a lane,
// four between lanes, which takes 32 shuffles for 256 columns. That is 2.1 million of a warp, 9 µs.

#include "device/dependent_launch.cuh"
#include "device/numeric.cuh"
#include "norm/quantise.h"
#include "norm/row_sums.cuh"

namespace embert {
namespace {

constexpr int kWarps = 4;
// As many blocks as an H100 runs at once, four or seven a multiprocessor; a block then takes several rows.
constexpr int most_blocks(bool normed) {
  return normed ? 528 : 924;
}

// The larger one; NaN where one of them is.
__device__ __forceinline__ float larger(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

// Four elements of a gamma or beta, anew for each row: the compiler would keep them in 64 registers, which leaves a
// multiprocessor 12 warps, too few loads in flight.
__device__ __forceinline__ Pack<float> load_cached(const float* from) {
  Pack<float> four;
  asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.values[0]), "=f"(four.values[1]), "=f"(four.values[2]), "=f"(four.values[3])
               : "l"(from));
  return four;
}

// 8 neighbouring columns of each of kPacks pieces of 256 columns.
template <int kPacks>
struct Rotated {
  float values[kPacks][8];

  __device__ __forceinline__ void rotate(int lane) {
#pragma unroll
    for (int stride = 1; stride < 8; stride *= 2) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if ((i & stride) != 0) continue;
          const float a = values[p][i], b = values[p][i + stride];
          values[p][i] = a + b, values[p][i + stride] = a - b;
        }
    }
#pragma unroll
    for (int step = 1; step < 16; step *= 2) {
      const float sign = (lane & step) != 0 ? -1.0f : 1.0f;
#pragma unroll
      for (int p = 0; p < kPacks; ++p)
#pragma unroll
        for (int i = 0; i < 8; ++i)  // a + b, a - b: the product is exact
          values[p][i] = fmaf(values[p][i], sign, __shfl_xor_sync(~0u, values[p][i], step));
    }
  }

  __device__ __forceinline__ float largest() const {
    float most = 0.0f;
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
#pragma unroll
      for (int i = 0; i < 8; ++i) most = larger(most, fabsf(values[p][i]));
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) most = larger(most, __shfl_xor_sync(~0u, most, step));
    return most;
  }

  // Adding 1.5 · 2²³ rounds to an integer, half to even, and leaves it in the lowest bits.
  __device__ __forceinline__ static uint32_t four(const float* values, float inverse) {
    uint32_t bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) bits[i] = __float_as_uint(__fadd_rn(__fmul_rn(values[i], inverse), 12582912.0f));
    return __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
  }
};

template <typename T, int kPacks, int kWarpsOfRow, bool kNormed>
__global__ void __launch_bounds__(kWarps * 32, kNormed ? 4 : 1)
    quantise_kernel(const Rows x, const Norm norm, int rows, int columns, float epsilon, const QuantisedRows to,
                    bool backwards) {
  constexpr int kRows = kWarps / kWarpsOfRow;  // of a block at a time
  __shared__ float most_of_warp[2][kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % kWarpsOfRow;
  const auto column_of = [&](int p) { return (p * kWarpsOfRow + part) * 256 + lane * 8; };
  dependents_may_launch();
  wait_for_earlier_kernels();
  // The next row's elements are on their way while a row is worked on.
  Pack<T> packs[kPacks];
  const auto row_at = [&](int at) { return backwards ? rows - 1 - min(at, rows - 1) : min(at, rows - 1); };
  const auto ask = [&](int at) {
    const T* const from = static_cast<const T*>(x.data) + size_t(row_at(at)) * columns;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (column_of(p) < columns) packs[p] = load_fresh(from + column_of(p));
    }
  };
  ask(blockIdx.x * kRows + warp / kWarpsOfRow);
  int round = 0;
  for (int at = blockIdx.x * kRows + warp / kWarpsOfRow; at - warp / kWarpsOfRow < rows; at += gridDim.x * kRows) {
    const bool is_row = at < rows;  // warps of a row agree; a block's wait for each other where they share rows
    const int row = row_at(at);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) stay_packed(packs[p]);
    float2 by = {1.0f, 0.0f};
    if constexpr (kNormed) by = row_scale(x, row, columns, epsilon, lane % 8);
    Rotated<kPacks> of;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int half = 0; half < 8; half += 4) {
        float* const four = of.values[p] + half;
        const int column = column_of(p) + half;
        const bool is_there = column < columns;
        Pack<float> gamma, beta;
        if constexpr (kNormed) {
          const int from_column = min(column, columns - 4);
          gamma = load_cached(norm.gamma + from_column), beta = load_cached(norm.beta + from_column);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          four[i] = is_there ? to_float(packs[p].values[half + i]) : 0.0f;
          if constexpr (kNormed)
            four[i] = is_there ? fmaf(fmaf(four[i], by.x, by.y), gamma.values[i], beta.values[i]) : 0.0f;
        }
      }
    }
    ask(at + gridDim.x * kRows);
    of.rotate(lane);
    float most = of.largest();
    if constexpr (kWarpsOfRow > 1) {
      if (lane == 0) most_of_warp[round % 2][warp] = most;
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kWarpsOfRow; ++i) most = larger(most, most_of_warp[round % 2][i]);
      ++round;
    }
    const float inverse = most == 0.0f ? 0.0f : __fdiv_rn(127.0f, most);
    if (!is_row) continue;
    if (lane == 0 && part == 0) to.scales[row] = __fmul_rn(most, 1.0f / 127.0f * 0.08838834764831845f);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (column_of(p) >= columns) continue;
      const uint2 eight = {of.four(of.values[p], inverse), of.four(of.values[p] + 4, inverse)};
      *reinterpret_cast<uint2*>(to.data + size_t(row) * columns + column_of(p)) = eight;
    }
  }
}

template <typename T, int kPacks, int kWarpsOfRow, bool kNormed>
Status launch_quantise(const Rows& x, const Norm& norm, int rows, int columns, float epsilon, const QuantisedRows& to,
                       const Stream& stream) {
  const int blocks = (rows * kWarpsOfRow + kWarps - 1) / kWarps;
  const int rounds = (blocks + most_blocks(kNormed) - 1) / most_blocks(kNormed);
  return launch("quantise", quantise_kernel<T, kPacks, kWarpsOfRow, kNormed>, (blocks + rounds - 1) / rounds,
                kWarps * 32, 0, stream, x, norm, rows, columns, epsilon, to, stream.backwards);
}

// Up to 1 024 columns a warp has a row, else a block.
template <typename T, bool kNormed>
Status quantise(const Rows& x, const Norm& norm, int rows, int columns, float epsilon, const QuantisedRows& to,
                const Stream& stream) {
  const auto go = [&](auto packs, auto warps) {
    return launch_quantise<T, decltype(packs)::value, decltype(warps)::value, kNormed>(x, norm, rows, columns, epsilon,
                                                                                       to, stream);
  };
  using One = std::integral_constant<int, 1>;
  using Four = std::integral_constant<int, 4>;
  const int pieces = (columns + 255) / 256;
  if (pieces == 1) return go(One(), One());
  if (pieces == 2) return go(std::integral_constant<int, 2>(), One());
  if (pieces == 3) return go(std::integral_constant<int, 3>(), One());
  if (pieces == 4) return go(Four(), One());
  if constexpr (!kNormed) {
    if (pieces <= 8) return go(std::integral_constant<int, 2>(), Four());
    if (pieces <= 12) return go(std::integral_constant<int, 3>(), Four());
    if (pieces <= 16) return go(Four(), Four());
    return go(std::integral_constant<int, 8>(), Four());
  }
  return Status::refused("quantise: a LayerNorm of " + std::to_string(columns) + " columns");
}

}  // namespace

Status quantise_rows(DType dtype, const Rows& x, const Norm& norm, int rows, int columns, float epsilon,
                     const QuantisedRows& to, const Stream& stream) {
  const bool normed = x.sums != nullptr;
  if (dtype != DType::kFloat16) return Status::refused("quantise: rows must be in float16");
  if (!quantise_takes(columns, normed))
    return Status::refused("quantise: rows of " + std::to_string(columns) + " columns; they must be a multiple of " +
                           std::to_string(kRotated) + (normed ? " of at most 1024" : " of at most 8192"));
  if (rows == 0) return {};
  return normed ? quantise<half_t, true>(x, norm, rows, columns, epsilon, to, stream)
                : quantise<half_t, false>(x, norm, rows, columns, epsilon, to, stream);
}

}  // namespace embert
