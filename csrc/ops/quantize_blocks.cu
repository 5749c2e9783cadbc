// Rotates rows and quantizes them to int8 with the same bits as the epilogues that write rows in blocks
// (ops/blocks.cuh): for few rows, and for rows in FP16.
//
// A block of threads has 16 rows and a warp one, two or four times 128 columns of them, in registers between load and
// store. Floor: x read and q written, 3 bytes an element.

#include "common/dependent_launch.cuh"
#include "common/numeric.cuh"
#include "ops/blocks.cuh"
#include "ops/quantize.h"

namespace embert {
namespace {

constexpr int kRows = 16;
constexpr int kWarps = 16;

template <int kBlock, int kOfWarp>
__global__ void __launch_bounds__(kWarps * 32)
    quantize_blocks_kernel(const half_t* x, int rows, int columns, const QuantizedRows to, bool backwards) {
  constexpr int kParts = kInnerBlock / kBlock, kTiles = kBlock / 8;  // blocks of a warp's 128 columns; m16n8 of a block
  __shared__ __half2 maxima[kOfWarp * kWarps * kParts][kRows / 2];   // of rows r and r + 8
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, blocks = columns / kBlock;
  const int first = int(backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * kRows + lane / 4;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  uint32_t bytes[kOfWarp][kParts][2][kTiles / 2];
#pragma unroll
  for (int i = 0; i < kOfWarp; ++i) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int block = (warp + i * kWarps) * kParts + part;
      if (block >= blocks) break;
      uint32_t y[2][kTiles];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const half_t* const from = x + size_t(min(first + 8 * r, rows - 1)) * columns + block * kBlock + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < kTiles; ++j) y[r][j] = *reinterpret_cast<const uint32_t*>(from + 8 * j);
      }
      rotate_block(y);
      const uint32_t most = block_maxima(y);
      round_block(y, most, bytes[i][part]);
      if (lane % 4 == 0) maxima[block][lane / 4] = as_half2(most);
    }
  }
  __syncthreads();
  __half2 most = as_half2(0);
  for (int i = lane % 4; i < blocks; i += 4) most = __hmax2_nan(most, maxima[i][lane / 4]);
  const __half2 largest = larger_of_row(most);
  const float2 inverses = row_inverses_of(largest);
#pragma unroll
  for (int i = 0; i < kOfWarp; ++i) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int block = (warp + i * kWarps) * kParts + part;
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
  const auto kernel = warps <= kWarps       ? quantize_blocks_kernel<kBlock, 1>
                      : warps <= 2 * kWarps ? quantize_blocks_kernel<kBlock, 2>
                                            : quantize_blocks_kernel<kBlock, 4>;
  return launch("quantize_blocks", kernel, (rows + kRows - 1) / kRows, kWarps * 32, 0, stream,
                static_cast<const half_t*>(x), rows, columns, to, stream.backwards);
}

}  // namespace

Status quantize_block_rows(DType dtype, const void* x, int rows, int columns, int block, const QuantizedRows& to,
                           const Stream& stream) {
  if (dtype != DType::kFloat16) return Status::refused("quantize: rows must be in float16");
  if (!quantize_supports(columns, false))
    return Status::refused("quantize: rows of " + std::to_string(columns) + " columns; they must be a multiple of " +
                           std::to_string(kQuantizedStep) + " of at most " + std::to_string(kMaxQuantized));
  if (rows == 0) return {};
  if (block == kInnerBlock) return launch_blocks<kInnerBlock>(x, rows, columns, to, stream);
  if (block == kHeadBlock) return launch_blocks<kHeadBlock>(x, rows, columns, to, stream);
  return Status::refused("quantize: blocks of " + std::to_string(block) + " columns");
}

}  // namespace embert
