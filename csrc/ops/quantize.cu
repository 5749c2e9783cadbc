// Rotates rows and quantizes them to int8: a thread has 32 columns of a row, in registers between load and store.
//
// Floor for 16 384 rows of 1 024: x read and q written, 50 MB, 17 µs at 3 TB/s; 67 for rows of 4 096 columns. A
// rotation of 32 columns takes 96 instructions of half2 and no shuffle. Loads are all in flight at once: a
// multiprocessor needs some 40 KB in flight. Rows are read again much later, so the L2 cache evicts them first:
// otherwise rows of 1 024 take 24 µs and not 20.

#include "common/launch.cuh"
#include "common/numeric.cuh"
#include "ops/blocks.cuh"
#include "ops/quantize.h"
#include "ops/row_stats.cuh"

namespace embert {
namespace {

constexpr int kWarps = 4;
constexpr int kMaxThreads = kMaxQuantized / kRotated;  // of a row

// Four elements of a gamma or beta. The compiler would keep those of all columns in 64 registers, which leaves too few
// registers for loads in flight.
__device__ __forceinline__ float4 load_cached(const float* from) {
  float4 loaded;
  asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(loaded.x), "=f"(loaded.y), "=f"(loaded.z), "=f"(loaded.w)
               : "l"(from));
  return loaded;
}

// The rounding of a row with largest rotated magnitude `maximum`. The power of two brings it near 1, so that 127 / most
// stays in FP16's range.
struct RowScale {
  __half2 power, inverse;
  float scale;

  __device__ __forceinline__ explicit RowScale(float maximum) {
    constexpr float kRoot = 5.65685424949238f;  // √32
    const int exponent = int(__float_as_uint(maximum) >> 23) - 127, shift = min(max(-exponent, -15), 15);
    const float up = __uint_as_float((127 + shift) << 23), down = __uint_as_float((127 - shift) << 23);
    const __half multiplier =
        maximum == 0.0f ? __half(0.0f) : __float2half_rn(__fdiv_rn(127.0f, __fmul_rn(maximum, up)));
    power = __float2half2_rn(up), inverse = __half2half2(multiplier);
    scale = maximum == 0.0f ? 0.0f : __fdiv_rn(__fmul_rn(kRoot, down), __half2float(multiplier));
  }
};

// A thread's 32 columns of a row.
struct QuarterSet {
  __half2 y[16];  // quarter j has 4j … 4j + 3

  __device__ __forceinline__ void load(const half_t* row, int columns, int set) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint4 eight = __ldcs(reinterpret_cast<const uint4*>(row + j * (columns / 4) + 8 * set));
      y[4 * j] = as_half2(eight.x), y[4 * j + 1] = as_half2(eight.y);
      y[4 * j + 2] = as_half2(eight.z), y[4 * j + 3] = as_half2(eight.w);
    }
  }

  // (x · by.x + by.y) · γ + β for the four columns that begin with pair `first`.
  __device__ __forceinline__ void normalize(int first, float2 factors, const float4& gamma, const float4& beta) {
    const float2 low = __half22float2(y[first]), high = __half22float2(y[first + 1]);
    y[first] = __floats2half2_rn(fmaf(fmaf(low.x, factors.x, factors.y), gamma.x, beta.x),
                                 fmaf(fmaf(low.y, factors.x, factors.y), gamma.y, beta.y));
    y[first + 1] = __floats2half2_rn(fmaf(fmaf(high.x, factors.x, factors.y), gamma.z, beta.z),
                                     fmaf(fmaf(high.y, factors.x, factors.y), gamma.w, beta.w));
  }

  // The factor keeps sums of all FP16 values in range.
  __device__ __forceinline__ void rotate() {
    const __half2 factor = as_half2(0x28002800), signs = as_half2(0xbc003c00);  // 2⁻⁵; 1 and −1
#pragma unroll
    for (int i = 0; i < 16; ++i) y[i] = __hmul2_rn(y[i], factor);
#pragma unroll
    for (int stride = 1; stride < 16; stride *= 2) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        if ((i & stride) != 0) continue;
        const __half2 a = y[i], b = y[i + stride];
        y[i] = __hadd2_rn(a, b), y[i + stride] = __hsub2_rn(a, b);
      }
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) y[i] = __hfma2(y[i], signs, __lowhigh2highlow(y[i]));
  }

  // The largest magnitude; NaN where one value is.
  __device__ __forceinline__ float largest() const {
    __half2 maximum = __habs2(y[0]);
#pragma unroll
    for (int i = 1; i < 16; ++i) maximum = __hmax2_nan(maximum, __habs2(y[i]));
    return __half2float(__hmax_nan(__low2half(maximum), __high2half(maximum)));
  }

  // Adding 1.5 · 2¹⁰ to a half rounds it to an integer, half to even, in the lowest bits.
  __device__ __forceinline__ void store(int8_t* row, int columns, int set, const RowScale& factors) const {
    const __half2 rounds = as_half2(0x66006600);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t q[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        q[i] = as_bits(__hfma2(__hmul2_rn(y[4 * j + i], factors.power), factors.inverse, rounds));
      const uint2 eight = {__byte_perm(q[0], q[1], 0x6420), __byte_perm(q[2], q[3], 0x6420)};
      *reinterpret_cast<uint2*>(row + j * (columns / 4) + 8 * set) = eight;
    }
  }
};

// Up to 1 024 columns: kLanes share a row, and iterate over kRows rows, so that a gamma is loaded once for them.
template <int kLanes, int kRows, bool kNormed>
__global__ void __launch_bounds__(kWarps * 32) quantize_kernel(const RowView x, const Norm norm, int rows, int columns,
                                                               float epsilon, const QuantizedRows to, bool backwards) {
  const int lane = threadIdx.x % kLanes, sets = columns / kRotated, set = min(lane, sets - 1);
  const int first = (blockIdx.x * kWarps * 32 + threadIdx.x) / kLanes * kRows;
  const auto row_of = [&](int i) { return backwards ? rows - 1 - min(first + i, rows - 1) : min(first + i, rows - 1); };
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  QuarterSet values[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    values[i].load(static_cast<const half_t*>(x.data) + size_t(row_of(i)) * columns, columns, set);
  if constexpr (kNormed) {
    float2 factors[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) factors[i] = row_scale(x, row_of(i), columns, epsilon, threadIdx.x % 8);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = j * (columns / 4) + 8 * set + 4 * half;
        const float4 gamma = load_cached(norm.gamma + column), beta = load_cached(norm.beta + column);
#pragma unroll
        for (int i = 0; i < kRows; ++i) values[i].normalize(4 * j + 2 * half, factors[i], gamma, beta);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    values[i].rotate();
    float maximum = values[i].largest();  // a set that two lanes have counts once
#pragma unroll
    for (int step = kLanes / 2; step > 0; step >>= 1) maximum = larger(maximum, __shfl_xor_sync(~0u, maximum, step));
    if (first + i >= rows || lane >= sets) continue;
    const int row = row_of(i);
    const RowScale factors(maximum);
    values[i].store(to.data + size_t(row) * columns, columns, set, factors);
    if (lane == 0) to.scales[row] = factors.scale;
  }
}

// More columns: one block per row.
__global__ void __launch_bounds__(kMaxThreads)
    quantize_wide_kernel(const half_t* x, int columns, const QuantizedRows to, bool backwards) {
  __shared__ float warp_maxima[kMaxThreads / 32];
  const int sets = columns / kRotated, set = min(int(threadIdx.x), sets - 1);
  const int row = backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  QuarterSet values;
  values.load(x + size_t(row) * columns, columns, set);
  values.rotate();
  float maximum = values.largest();
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) maximum = larger(maximum, __shfl_xor_sync(~0u, maximum, step));
  if (threadIdx.x % 32 == 0) warp_maxima[threadIdx.x / 32] = maximum;
  __syncthreads();
  for (int i = 0; i < blockDim.x / 32; ++i) maximum = larger(maximum, warp_maxima[i]);
  const RowScale factors(maximum);
  if (threadIdx.x < sets) values.store(to.data + size_t(row) * columns, columns, set, factors);
  if (threadIdx.x == 0) to.scales[row] = factors.scale;
}

Status check_rows(DType dtype, int columns, bool normed) {
  if (dtype != DType::kFloat16) return Status::refused("quantize: rows must be in float16");
  if (quantize_supports(columns, normed)) return {};
  return Status::refused("quantize: rows of ", columns, " columns; they must be a multiple of ", kQuantizedStep,
                         " of at most ", normed ? kMaxStatColumns : kMaxQuantized);
}

template <int kLanes, bool kNormed>
Status launch_quantize(const RowView& x, const Norm& norm, int rows, int columns, float epsilon,
                       const QuantizedRows& to, const Stream& stream) {
  constexpr int kRows = kNormed ? 2 : 1, kRowsPerBlock = kWarps * 32 / kLanes * kRows;
  return launch("quantize", quantize_kernel<kLanes, kRows, kNormed>, (rows + kRowsPerBlock - 1) / kRowsPerBlock,
                kWarps * 32, 0, stream, x, norm, rows, columns, epsilon, to, stream.backwards);
}

template <bool kNormed>
Status quantize(const RowView& x, const Norm& norm, int rows, int columns, float epsilon, const QuantizedRows& to,
                const Stream& stream) {
  const int sets = columns / kRotated;
  const auto go = [&](auto run) { return run(x, norm, rows, columns, epsilon, to, stream); };
  if (sets <= 8) return go(launch_quantize<8, kNormed>);
  if (sets <= 16) return go(launch_quantize<16, kNormed>);
  if (sets <= 32) return go(launch_quantize<32, kNormed>);
  return launch("quantize_wide", quantize_wide_kernel, rows, (sets + 31) / 32 * 32, 0, stream,
                static_cast<const half_t*>(x.data), columns, to, stream.backwards);
}

// Rotates rows and quantizes them to int8 with the same bits as the epilogues that write rows in blocks
// (ops/blocks.cuh): for few rows, and for rows in FP16.
//
// A block of threads has 16 rows and a warp one, two or four times 128 columns of them, in registers between load and
// store. Floor: x read and q written, 3 bytes an element.

constexpr int kBlockRows = 16;
constexpr int kBlockWarps = 16;

template <int kBlock, int kPerWarp>
__global__ void __launch_bounds__(kBlockWarps * 32)
    quantize_blocks_kernel(const half_t* x, int rows, int columns, const QuantizedRows to, bool backwards) {
  constexpr int kParts = kInnerBlock / kBlock, kTiles = kBlock / 8;  // blocks of a warp's 128 columns; m16n8 of a block
  __shared__ __half2 maxima[kPerWarp * kBlockWarps * kParts][kBlockRows / 2];  // of rows r and r + 8
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, blocks = columns / kBlock;
  const int first = int(backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * kBlockRows + lane / 4;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  uint32_t bytes[kPerWarp][kParts][2][kTiles / 2];
#pragma unroll
  for (int i = 0; i < kPerWarp; ++i) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int block = (warp + i * kBlockWarps) * kParts + part;
      if (block >= blocks) break;
      uint32_t y[2][kTiles];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const half_t* const from = x + size_t(min(first + 8 * r, rows - 1)) * columns + block * kBlock + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < kTiles; ++j) y[r][j] = *reinterpret_cast<const uint32_t*>(from + 8 * j);
      }
      rotate_block(y);
      const uint32_t maximum = block_maxima(y);
      round_block(y, maximum, bytes[i][part]);
      if (lane % 4 == 0) maxima[block][lane / 4] = as_half2(maximum);
    }
  }
  __syncthreads();
  __half2 maximum = as_half2(0);
  for (int i = lane % 4; i < blocks; i += 4) maximum = __hmax2_nan(maximum, maxima[i][lane / 4]);
  const __half2 largest = larger_of_row(maximum);
  const float2 inverses = row_inverses_of(largest);
#pragma unroll
  for (int i = 0; i < kPerWarp; ++i) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int block = (warp + i * kBlockWarps) * kParts + part;
      if (block >= blocks) break;
      const BlockFactors factors(maxima[block][lane / 4], inverses);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (first + 8 * r >= rows) continue;
        int8_t* const destination = to.data + size_t(first + 8 * r) * columns + block * kBlock + lane % 4 * 4;
#pragma unroll
        for (int j = 0; j < kTiles / 2; ++j) {
          const uint32_t bytes4 = bytes[i][part][r][j];
          *reinterpret_cast<uint32_t*>(destination + 16 * j) =
              r == 0 ? factors.apply<0>(bytes4) : factors.apply<1>(bytes4);
        }
      }
    }
  }
  if (warp == 0 && lane % 4 < 2 && first + 8 * (lane % 4) < rows)
    to.scales[first + 8 * (lane % 4)] =
        row_scale_of<kBlock>(lane % 4 == 0 ? __low2float(largest) : __high2float(largest));
}

template <int kBlock>
Status launch_blocks(const void* x, int rows, int columns, const QuantizedRows& to, const Stream& stream) {
  const int warps = columns / kInnerBlock;
  const auto kernel = warps <= kBlockWarps       ? quantize_blocks_kernel<kBlock, 1>
                      : warps <= 2 * kBlockWarps ? quantize_blocks_kernel<kBlock, 2>
                                                 : quantize_blocks_kernel<kBlock, 4>;
  return launch("quantize_blocks", kernel, (rows + kBlockRows - 1) / kBlockRows, kBlockWarps * 32, 0, stream,
                static_cast<const half_t*>(x), rows, columns, to, stream.backwards);
}

}  // namespace

Status quantize_rows(DType dtype, const RowView& x, const Norm& norm, int rows, int columns, float epsilon,
                     const QuantizedRows& to, const Stream& stream) {
  const bool normed = x.stats != nullptr;
  EMBERT_TRY(check_rows(dtype, columns, normed));
  if (rows == 0) return {};
  return normed ? quantize<true>(x, norm, rows, columns, epsilon, to, stream)
                : quantize<false>(x, norm, rows, columns, epsilon, to, stream);
}

Status quantize_block_rows(DType dtype, const void* x, int rows, int columns, int block, const QuantizedRows& to,
                           const Stream& stream) {
  EMBERT_TRY(check_rows(dtype, columns, false));
  if (rows == 0) return {};
  if (block == kInnerBlock) return launch_blocks<kInnerBlock>(x, rows, columns, to, stream);
  if (block == kHeadBlock) return launch_blocks<kHeadBlock>(x, rows, columns, to, stream);
  return Status::refused("quantize: blocks of ", block, " columns");
}

}  // namespace embert
