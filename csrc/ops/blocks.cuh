// Rows quantized to int8 in blocks of columns: inner activations in blocks of 128, written by FFN in, and attention's
// context in heads of 64. The next GEMM rescales a block's int8 values to the row's one scale (EPILOGUES.md).
// tests/oracles/int8_rows.py is the same in numpy, to the bit.
//
// A warp has 16 rows of a block as accumulators of m16n8: with g = lane / 4 and t = lane % 4, y[0][j] are columns 8j +
// 2t and the next of row g, and y[1][j] of row g + 8.
#pragma once

#include <cstdint>

#include "common/numeric.cuh"

namespace embert {

// Multiplies the columns of a block that are the same modulo 8 by a Sylvester-Hadamard matrix, of order 16 for blocks
// of 128: a lane has them all. Each sum is rounded to FP16.
template <int kTiles>
__device__ __forceinline__ void rotate_block(uint32_t (&y)[2][kTiles]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int stride = 1; stride < kTiles; stride *= 2) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        if ((j & stride) != 0) continue;
        const __half2 a = as_half2(y[r][j]), b = as_half2(y[r][j + stride]);
        y[r][j] = as_bits(__hadd2_rn(a, b)), y[r][j + stride] = as_bits(__hsub2_rn(a, b));
      }
    }
  }
}

// Lower bound of a block's maximum: 127 over it must be in FP16's range.
constexpr uint32_t kMinMaximum = 0x18001800;  // 2⁻⁹, twice

// The row maxima of rows g and g + 8 over their four lanes; NaN where one value is.
__device__ __forceinline__ __half2 larger_of_row(__half2 maximum) {
  maximum = __hmax2_nan(maximum, as_half2(__shfl_xor_sync(~0u, as_bits(maximum), 1)));
  return __hmax2_nan(maximum, as_half2(__shfl_xor_sync(~0u, as_bits(maximum), 2)));
}

// The largest magnitudes of rows g and g + 8 in the block; NaN where one value is. The row's four lanes get it.
template <int kTiles>
__device__ __forceinline__ uint32_t block_maxima(const uint32_t (&y)[2][kTiles]) {
  __half2 maximum[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    maximum[r] = __habs2(as_half2(y[r][0]));
#pragma unroll
    for (int j = 1; j < kTiles; ++j) maximum[r] = __hmax2_nan(maximum[r], __habs2(as_half2(y[r][j])));
  }
  __half2 both = __hmax2_nan(__lows2half2(maximum[0], maximum[1]), __highs2half2(maximum[0], maximum[1]));
  return as_bits(__hmax2_nan(larger_of_row(both), as_half2(kMinMaximum)));
}

// half(127 / most). The approximation does not change the rounding of the quotient: 127 over an FP16 number is at least
// 2.4e-7 of it away from the nearest rounding boundary.
__device__ __forceinline__ __half2 block_inverse(__half maximum) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(__half2float(maximum)));
  return __float2half2_rn(127.0f * inverse);
}

// 128 + rint(y · 127 / most), half to even, of 16 columns each: adding 1 152 to a half rounds it to an integer in the
// lowest bits. A lane's four bytes of 16 columns are those of columns 2t, 2t + 1, 2t + 8 and 2t + 9.
template <int kTiles>
__device__ __forceinline__ void round_block(const uint32_t (&y)[2][kTiles], uint32_t maxima,
                                            uint32_t (&bytes)[2][kTiles / 2]) {
  const __half2 maximum = as_half2(maxima), rounds = as_half2(0x64806480);
  const __half2 row_inverses[2] = {block_inverse(__low2half(maximum)), block_inverse(__high2half(maximum))};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int j = 0; j < kTiles; j += 2) {
      bytes[r][j / 2] = __byte_perm(as_bits(__hfma2(as_half2(y[r][j]), row_inverses[r], rounds)),
                                    as_bits(__hfma2(as_half2(y[r][j + 1]), row_inverses[r], rounds)), 0x6420);
    }
  }
}

// Rescales int8 values of two rows' blocks, 128 + q a byte, to their rows' scales: rint(q · f / 128), half to even,
// where f = rint(128 · a block's maximum / the row's). Adding 1 024 rounds f to an integer when it becomes a half.
// 1 152 + q as a half times f / 128 plus 1 536 − 9 · f is 1 536 plus the result; rounding it to FP16 rounds to an
// integer. The first row has the low halves.
struct BlockFactors {
  __half2 factors, offsets;

  BlockFactors() = default;
  // inverses: 128 over the rows' largest maxima.
  __device__ __forceinline__ BlockFactors(__half2 maxima, float2 inverses) {
    const __half2 f = __floats2half2_rn(fmaf(__low2float(maxima), inverses.x, 1024.0f),
                                        fmaf(__high2float(maxima), inverses.y, 1024.0f));
    factors = __hfma2(f, as_half2(0x20002000), as_half2(0xc800c800));  // f / 128 − 8
    offsets = __hfma2(f, as_half2(0xc880c880), as_half2(0x71407140));  // 10 752 − 9 · f
  }
  template <int kRow>
  __device__ __forceinline__ uint32_t apply(uint32_t bytes4) const {
    const __half2 factor = kRow == 0 ? __low2half2(factors) : __high2half2(factors);
    const __half2 offset = kRow == 0 ? __low2half2(offsets) : __high2half2(offsets);
    const uint32_t low = __byte_perm(bytes4, 0x64646464, 0x4140), high = __byte_perm(bytes4, 0x64646464, 0x4342);
    return __byte_perm(as_bits(__hfma2(as_half2(low), factor, offset)),
                       as_bits(__hfma2(as_half2(high), factor, offset)), 0x6420);
  }
};

__device__ __forceinline__ float2 row_inverses_of(__half2 largest) {
  return {__fdiv_rn(128.0f, __low2float(largest)), __fdiv_rn(128.0f, __high2float(largest))};
}

// A row's scale from its largest maximum. It includes the rotation's factor; of inner activations that is 4, which
// cancels the factor ¼ of their rows.
template <int kBlock>
__device__ __forceinline__ float row_scale_of(float maximum) {
  static_assert(kBlock == 128 || kBlock == 64);
  constexpr float kRoot = kBlock == 128 ? 1.0f : 2.82842712474619f;
  return __fmul_rn(maximum, 1.0f / (127.0f * kRoot));
}
template <int kBlock>
__device__ __forceinline__ float2 row_scales_of(__half2 largest) {
  return {row_scale_of<kBlock>(__low2float(largest)), row_scale_of<kBlock>(__high2float(largest))};
}

}  // namespace embert
