// Disentangled attention (DeBERTa) for 16-bit storage, on sm_80 and later:
//   score(i, j) = scale · (q[i]·k[j] + q[i]·K[r] + Q[r]·k[j]), r the row of a table for the distance i − j.
// K and Q are the table's rows after a layer's linear layers: weights, computed once.
//
// The 64 queries of a tile and the 64 keys of a step are 127 distances apart at most. Their rows are a band in shared
// memory, in the order of distances: the copy looks up the row of each, so buckets cost nothing afterwards. The next
// step's distances are 64 less, so it keeps one half of the band and copies the other.
//
// A warp's 16 queries are 79 distances apart from the step's keys, and so are its 16 keys from the tile's queries: each
// part of the scores is one product [16, 80] a warp, 1.25 times that of q·k. A score is on a diagonal of it. The
// products pass through shared memory in FP32, where Q was, and become the first values of the scores, to which Q·Kᵀ
// adds. No rows of distances are in global memory but the table's own.
//
// Q·Kᵀ, P·V and the two parts are 1 + 1 + 1.25 + 1.25 products of a tile and a step: 2.25 times plain attention. A step
// copies K, V and half a band of each table, twice plain attention's bytes, and the tables stay in the L2 cache: a head
// of 64 columns has 128 KB of them with 512 rows.
//
// One kernel for all lengths: what a text's tiles do depends on nothing but its own length, so results are
// batch-invariant.

#include "attention/attention.h"
#include "attention/tile.cuh"
#include "common/launch.cuh"
#include "ops/attention_work.h"

namespace embert {
namespace {

constexpr int kWarps = kTileWarps, kThreads = kTileThreads;
constexpr int kKeys = 64;                                      // of a step
constexpr int kHalf = 64;                                      // rows of half a band
constexpr int kWarpRows = 80;                                  // of the band that a warp multiplies by: 79 distances
constexpr int kProductPitch = 88;                              // floats: rows g and g + 1 are 24 banks apart
constexpr int kFirstOfKeys = kAttentionRows - kKeys / kWarps;  // the band's first row for the first warp's keys
static_assert(kAttentionRows == 16 * kWarps && kKeys == 16 * kWarps && kHalf == kKeys, "a warp owns 16 rows of each");

// Shared memory: two steps of K and V, two bands, then Q, which the products overwrite.
template <typename T, int kDim>
constexpr size_t shared_bytes() {
  constexpr size_t kRow = (kDim + 8) * sizeof(T);
  constexpr size_t kProducts = size_t(kAttentionRows) * kProductPitch * sizeof(float);
  static_assert(kProducts >= kAttentionRows * kRow, "Q is not larger");
  return (4 * kKeys + 4 * kHalf) * kRow + kProducts;
}

// The start of 16 rows of the band, from row `row` on, a multiple of 16: its halves change places at every step.
template <int kPitch, typename T>
__device__ __forceinline__ const T* band_rows(const T* band, int row, int step) {
  return band + (((row / kHalf) ^ step) % 2 * kHalf + row % kHalf) * kPitch;
}

// A half of a band: row r is the table's row for the distance `distance` + r.
template <typename T, int kDim>
__device__ __forceinline__ void copy_band(T* to, const T* table, const DisentangledScores& positions, size_t pitch,
                                          int dim, int distance) {
  constexpr int kPacks = kDim / 8, kRowsAtOnce = kThreads / kPacks;
  static_assert(kThreads % kPacks == 0 && kHalf % kRowsAtOnce == 0, "a thread keeps its column");
  const int first = threadIdx.x / kPacks, pack = threadIdx.x % kPacks;
  const bool real = pack * 8 < dim;
#pragma unroll
  for (int i = 0; i < kHalf / kRowsAtOnce; ++i) {
    const int row = first + i * kRowsAtOnce, farthest = positions.longest - 1;
    const int place = min(max(distance + row, -farthest), farthest) + farthest;  // a step goes on past the text's end
    cp_async(shared_address(to + row * (kDim + 8) + pack * 8),
             real ? table + positions.row_of[place] * pitch + pack * 8 : table, real);
  }
}

// 16 rows, as the left operand, times 80 rows of the band from `row` on → `products` [16, kProductPitch].
template <typename T, int kDim>
__device__ __forceinline__ void multiply_band(const uint32_t (&a)[kDim / 16][4], const T* band, int row, int step,
                                              float* products, int lane) {
  constexpr int kPitch = kDim + 8;
  float c[kWarpRows / 8][4];
#pragma unroll
  for (int n = 0; n < kWarpRows / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) c[n][i] = 0.0f;
#pragma unroll
  for (int n = 0; n < kWarpRows / 16; ++n) {
    const uint32_t address = shared_address(band_rows<kPitch>(band, row + n * 16, step) +
                                            (lane % 8 + (lane / 16) * 8) * kPitch + ((lane / 8) % 2) * 8);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      uint32_t b[4];
      ldmatrix_x4(b, address + k * 16 * sizeof(T));
      mma_m16n8k16<T>(c[2 * n], a[k], b[0], b[1]);
      mma_m16n8k16<T>(c[2 * n + 1], a[k], b[2], b[3]);
    }
  }
  float* const to = products + lane / 4 * kProductPitch + 2 * (lane % 4);
#pragma unroll
  for (int n = 0; n < kWarpRows / 8; ++n) {
    *reinterpret_cast<float2*>(to + n * 8) = {c[n][0], c[n][1]};
    *reinterpret_cast<float2*>(to + n * 8 + 8 * kProductPitch) = {c[n][2], c[n][3]};
  }
}

template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads, kDim <= 64 ? 2 : 1)
    attention_sm80_disentangled_kernel(const T* qkv, const AttentionTile* tiles, int heads, int dim, float scale_log2,
                                       T* context, Queries queries, const DisentangledScores positions) {
  using Warp = AttentionWarp<T, kDim, kKeys>;
  constexpr int kPitch = Warp::kPitch;
  extern __shared__ __align__(16) uint8_t shared_bytes_of_block[];
  T* const keys = reinterpret_cast<T*>(shared_bytes_of_block);  // [2][kKeys][kPitch]
  T* const values = keys + 2 * kKeys * kPitch;
  T* const key_band = values + 2 * kKeys * kPitch;      // rows that queries are multiplied by, [2][kHalf][kPitch]
  T* const query_band = key_band + 2 * kHalf * kPitch;  // rows that keys are multiplied by
  T* const query_rows = query_band + 2 * kHalf * kPitch;
  float* const products = reinterpret_cast<float*>(query_rows);
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();

  const int head = blockIdx.x;  // heads of one tile run side by side: their rows are adjacent in memory
  const AttentionTile tile = tiles[blockIdx.y];
  if (tile.length == 0 || !is_needed(tile, queries, kAttentionRows)) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = 2 * (lane % 4);
  const size_t table_pitch = size_t(heads) * dim, pitch = 3 * table_pitch;
  const T* const q_from = qkv + size_t(tile.first_row) * pitch + head * dim;
  const T* const k_from = q_from + table_pitch;
  const T* const v_from = k_from + table_pitch;
  const T* const key_table = static_cast<const T*>(positions.keys);
  const T* const query_table = static_cast<const T*>(positions.queries);
  const int steps = (tile.length + kKeys - 1) / kKeys;
  const auto fetch = [&](int step) {
    const int slot = step % 2, key = step * kKeys;
    copy_head_rows<T, kDim, kKeys, kThreads>(keys + slot * kKeys * kPitch, k_from + key * pitch, pitch,
                                             tile.length - key, dim, threadIdx.x);
    copy_head_rows<T, kDim, kKeys, kThreads>(values + slot * kKeys * kPitch, v_from + key * pitch, pitch,
                                             tile.length - key, dim, threadIdx.x);
  };
  // The half of smaller distances of a step's band; that of the step before is its other one.
  const auto fetch_band = [&](int step) {
    const int slot = step & 1, distance = tile.query - step * kKeys - (kKeys - 1);
    if (key_table)
      copy_band<T, kDim>(key_band + slot * kHalf * kPitch, key_table + head * dim, positions, table_pitch, dim,
                         distance);
    if (query_table)
      copy_band<T, kDim>(query_band + slot * kHalf * kPitch, query_table + head * dim, positions, table_pitch, dim,
                         distance);
  };

  copy_head_rows<T, kDim, kAttentionRows, kThreads>(query_rows, q_from + tile.query * pitch, pitch,
                                                    tile.tokens() - tile.query, dim, threadIdx.x);
  fetch_band(-1);
  fetch_band(0);
  fetch(0);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  const int rows = min(16, tile.tokens() - tile.query - warp * 16);  // of this warp
  Warp work;
  if (rows > 0) work.start(query_rows + warp * 16 * kPitch, lane);
  __syncthreads();  // Q's memory is that of the products from here on
  float* const own_products = products + warp * 16 * kProductPitch;
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) fetch(step + 1);
    cp_async_commit();
    cp_async_wait<1>();  // this step's keys, values and band
    __syncthreads();
    const T* const k = keys + step % 2 * kKeys * kPitch;
    const T* const v = values + step % 2 * kKeys * kPitch;
    const int left = tile.length - step * kKeys;
    float s[kKeys / 8][4];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = 0.0f;
    if (key_table && rows > 0) {
      multiply_band<T, kDim>(work.q, key_band, warp * 16, step, own_products, lane);
      __syncwarp();
      // The warp's distance of row r and key j: r − j + 63.
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = g + i / 2 * 8;
          s[n][i] = own_products[row * kProductPitch + row - (n * 8 + t + i % 2) + kKeys - 1];
        }
      __syncwarp();
    }
    if (query_table && warp * 16 < left) {
      uint32_t a[kDim / 16][4];  // the warp's keys as the left operand
      const uint32_t address = shared_address(k + (warp * 16 + lane % 16) * kPitch + (lane / 16) * 8);
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) ldmatrix_x4(a[i], address + i * 16 * sizeof(T));
      multiply_band<T, kDim>(a, query_band, kFirstOfKeys - warp * 16, step, own_products, lane);
    }
    __syncthreads();  // no warp reads the half of larger distances any more, and all products of keys are there
    if (step + 1 < steps) fetch_band(step + 1);
    cp_async_commit();
    if (rows > 0) {
      if (query_table) {
        // Query i of the tile and key j, counted from the first distance of the 16 keys with j on: i − j % 16 + 15.
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int row = warp * 16 + g + i / 2 * 8, key = n * 8 + t + i % 2;
            s[n][i] += products[key * kProductPitch + row - key % 16 + 15];
          }
      }
      work.template step<true>(k, v, left, scale_log2, s, lane);
    }
    __syncthreads();  // all warps have read this slot and the products
  }
  if (rows > 0) {
    const size_t row = size_t(tile.first_row) + tile.query + warp * 16;
    work.finish(context + row * table_pitch + head * dim, table_pitch, rows, dim, lane);
  }
}

// One block per tile and head.
template <typename T, int kDim>
Status launch_disentangled(const void* qkv, const AttentionWork& work, const AttentionHeads& shape,
                           const DisentangledScores& positions, void* context, const Stream& stream) {
  const auto run = [&](const AttentionTile* tiles, int count) {
    return launch_work("attention_sm80_disentangled", attention_sm80_disentangled_kernel<T, kDim>, shape.heads, count,
                       shared_bytes<T, kDim>(), stream, static_cast<const T*>(qkv), tiles, shape.heads, shape.head_size,
                       float(1.4426950408889634 * scale_of(shape)), static_cast<T*>(context), work.queries, positions);
  };
  EMBERT_TRY(run(work.tiles, work.tile_count));
  return run(work.shorts, work.short_count);
}

}  // namespace

Status attention_sm80_disentangled(DType dtype, const void* qkv, const AttentionWork& work, const AttentionHeads& shape,
                                   const DisentangledScores& positions, void* context, const Stream& stream) {
  EMBERT_TRY(check_attention_work(work.tile_count, work.short_count));
  if (dtype == DType::kFloat32 || shape.kv_heads != shape.heads || shape.causal || shape.head_size % 8 != 0 ||
      shape.head_size < 8 || shape.head_size > 128 || positions.longest < 1)
    return Status::refused("attention: disentangled scores in FP32, with shared keys, causal, of heads of ",
                           shape.head_size, " columns, or of texts of up to ", positions.longest, " tokens");
  return with_half_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const auto launcher = shape.head_size <= 32   ? launch_disentangled<T, 32>
                          : shape.head_size <= 64 ? launch_disentangled<T, 64>
                                                  : launch_disentangled<T, 128>;
    return launcher(qkv, work, shape, positions, context, stream);
  });
}

}  // namespace embert
