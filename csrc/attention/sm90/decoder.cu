// Attention of decoders on Hopper: heads that share keys and values, causal or with windows; head sizes 64, 128 and
// 256, 16-bit types. Texts of up to 32 tokens are sm80_decoder.cu's.
//
// A block is two warpgroups of 64 query rows each, which share K and V: two heads of a group with the same queries, or
// where a group has an odd number of heads, two tiles of one head. Both products are wgmma; TMA loads Q once, and K and
// V in a pipeline whose stages are 64 keys or values. One warp issues the loads. It refills all stages that both
// warpgroups have read, so they wait for each other only when they are a whole pipeline apart. A warpgroup computes
// only the steps in which one of its queries attends to a key. Steps begin at multiples of 64 keys from the text's
// start, so a row's bits depend on its text alone.
//
// By count, 16 texts of 4 096 tokens with 16 heads of 128 on 8 of keys, a causal layer on an H100 (132 multiprocessors
// at 1.755 GHz); the products count half of the square:
//   products            1.10 TFLOP         1.1 ms at 989 TFLOP/s
//   exponentials        2.2 · 10⁹          0.6 ms at 16 a cycle and multiprocessor
//   K and V from L2     8.7 GB             1.6 ms at 5.5 TB/s; twice that without shared tiles
//   Q, K, V, context    0.8 GB of memory   0.3 ms
// It takes 2.3 ms (485 TFLOP/s), and sm80_decoder.cu 4.0 ms. Passages (25 183 tokens of 256 texts) are bound by memory:
// 309 MB, 103 µs at 3 TB/s; they take 123 µs. Heads of 256 (3 on 1, 32 texts of 2 048 tokens, both directions): 572
// TFLOP/s, 492 in windows of ± 512.
//
// Four warpgroups share a multiprocessor, two blocks of 128 registers a thread; with 256 columns, whose 128 sums take a
// thread's registers, two. Within a warpgroup, P·V of a step overlaps with Q·Kᵀ and the softmax of the next: at head
// size 256 that gives 572 TFLOP/s instead of 541, at 64 376 instead of 361. At 128, one step's weights and the next
// one's scores do not fit, and one block of twice the registers is slower (418 TFLOP/s).
//
// With few tiles, one short text's for example, only the length of a tile's chain of steps counts. A block then has one
// warpgroup, which shares its multiprocessor with no other, and overlaps at 128 columns, too. Its bits are the same.
//
// Texts that continue a prefix (ops/attention_work.h): a step's keys come from the prefix's rows, from the text's own,
// or in the one step across the boundary from both, in boxes of 8 rows. Only the loads differ, so the bits are those of
// a text that has all rows itself. They are separate kernels, launched for batches with prefixes only.
//
// The tiles with the most steps start first: of causal attention the last ones of a text, so that the last blocks of
// the launch are short.

#include "attention/attention.h"
#include "attention/sm90/tile.cuh"
#include "common/launch.cuh"
#include "common/tensor_maps.h"

namespace embert {
namespace sm90 {

template <int kDim, int kGroupsValue>
struct DecoderLayout {
  static constexpr int kGroups = kGroupsValue, kThreads = kGroups * kTileThreads;
  static constexpr int kBlocks = kDim <= 128 && kGroups == 2 ? 2 : 1;  // on a multiprocessor
  static constexpr int kBoxes = kDim / 64;                             // of 64 columns, whose rows are swizzled
  static constexpr int kBoxBytes = kTileRows * 128;
  static constexpr int kTileBytes = kBoxes * kBoxBytes;
  static constexpr int kStages = 5;  // K, V, K, V, …
  static constexpr int kQ = 0, kKv = kGroups * kTileBytes;
  static constexpr int kFull = kKv + kStages * kTileBytes;  // mbarriers
  static constexpr int kEmpty = kFull + kStages * 8, kQueries = kEmpty + kStages * 8;
  static constexpr int kSharedBytes = kQueries + 8;
  static constexpr bool kOverlaps = kDim != 128 || kGroups == 1;  // a step's P·V with the next one's Q·Kᵀ and softmax
  static_assert(kBlocks * (kSharedBytes + 1024) <= 228 * 1024, "as many blocks on a multiprocessor");
};

// A stage of the pipeline of K and V, and how often it was used before.
template <int kStages>
struct KvPipelineState {
  int stage = 0, uses = 0;

  __device__ __forceinline__ void advance(int boxes) {
    stage += boxes;
    if (stage >= kStages) stage -= kStages, ++uses;
  }
};

}  // namespace sm90

namespace {

using namespace sm90;

// The same for all lanes of a warp, and the compiler knows it: what depends on it stays in uniform registers, and no
// R2UR precedes a wgmma (common/warp.cuh). That took head size 128 from 445 to 485 TFLOP/s.
__device__ __forceinline__ AttentionTile uniform(const AttentionTile& tile) {
  return {__shfl_sync(~0u, tile.first_row, 0), __shfl_sync(~0u, tile.length, 0), __shfl_sync(~0u, tile.query, 0),
          __shfl_sync(~0u, tile.hidden, 0)};
}

// The division of a launch's query heads into blocks.
struct DecoderHeads {
  int heads, kv_heads, group;
  bool pairs_heads;  // a block has two heads, otherwise two tiles
};

// atom_map: boxes of kPrefixStep rows and 64 columns, for prefixes.
template <typename T, int kDim, int kGroups, typename Prefixes>
__device__ __forceinline__ void attend_decoder_tile(const CUtensorMap& qkv_map, const CUtensorMap& atom_map,
                                                    const AttentionTile* tiles, const Prefixes& prefixes,
                                                    const DecoderHeads& shape, float scale_log2, T* context,
                                                    Queries queries, const KeyWindow& window) {
  constexpr bool kHasPrefixes = !std::is_same_v<Prefixes, NoPrefixes>;
  using At = DecoderLayout<kDim, kGroups>;
  extern __shared__ __align__(1024) uint8_t smem[];
  const uint32_t base = shared_address(smem), full = base + At::kFull, empty = base + At::kEmpty;
  const int group = warp_index() / 4, warp = warp_index() % 4, lane = threadIdx.x % 32;
  const AttentionTile tile = uniform(early_tile(tiles + (gridDim.y - 1 - blockIdx.y)));
  TilePrefix prefix{};
  if constexpr (kHasPrefixes) {
    prefix = prefixes[gridDim.y - 1 - blockIdx.y];
    prefix = {__shfl_sync(~0u, prefix.row, 0), __shfl_sync(~0u, prefix.tokens, 0)};
  }
  const int tiles_of_block = shape.pairs_heads ? 1 : At::kGroups;
  const int groups = shape.pairs_heads || tile.query + kTileRows < tile.tokens() ? At::kGroups : 1;  // with queries
  if (threadIdx.x == 0) {
    prefetch_tensor_maps(qkv_map);
    for (int stage = 0; stage < At::kStages; ++stage) {
      mbarrier_init(full + 8 * stage, 1);
      mbarrier_init(empty + 8 * stage, 4 * groups);
    }
    mbarrier_init(base + At::kQueries, 1);
    fence_mbarrier_init();
  }
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();  // not earlier: gemm/kernels/small_m.cuh
  const bool is_second = (tile.query - prefix.tokens) / kTileRows % tiles_of_block != 0;
  if (tile.length == 0 || is_second || !is_needed(tile, queries, tiles_of_block * kTileRows)) return;
  __syncthreads();
  if (group >= groups) return;

  const int first_head = shape.pairs_heads ? blockIdx.x * At::kGroups : blockIdx.x;
  const int key_head = shape.heads + first_head / shape.group;
  const int head = first_head + (shape.pairs_heads ? group : 0);
  const int query = tile.query + (shape.pairs_heads ? 0 : group * kTileRows);  // the warpgroup's first
  // The steps of the block, and of this warpgroup.
  const int last_query = tile.query + (groups == tiles_of_block ? groups : 1) * kTileRows - 1;
  const int block_end = window.end_step(last_query, tile.length, kTileRows);
  const int block_first = window.first_step(tile.query, block_end, kTileRows);
  const int end = window.end_step(query + kTileRows - 1, tile.length, kTileRows);
  const int first = window.first_step(query, end, kTileRows);

  KvPipelineState<At::kStages> next;
  int next_box = 2 * block_first;  // of the text: the keys of step i are 2·i, its values 2·i + 1
  const bool fetches = group == 0 && warp == 0;
  const auto refill = [&](int needed) {  // for this warp; waits only for the boxes up to `needed`
    while (next_box < 2 * block_end) {
      if (next.uses > 0) {
        const uint32_t barrier = empty + 8 * next.stage, phase = (next.uses - 1) % 2;
        if (next_box <= needed)
          mbarrier_wait(barrier, phase);
        else if (!__all_sync(~0u, mbarrier_test_wait(barrier, phase)))
          return;
      }
      if (elect_one()) {
        const uint32_t barrier = full + 8 * next.stage;
        mbarrier_arrive_expect_tx(barrier, At::kTileBytes);
        const uint32_t to = base + At::kKv + next.stage * At::kTileBytes;
        const int chunk = (key_head + next_box % 2 * shape.kv_heads) * At::kBoxes, key = next_box / 2 * kTileRows;
        if (!kHasPrefixes || key >= prefix.tokens) {
          tma_load_3d(&qkv_map, to, barrier, chunk, tile.first_row + key);
        } else if (key + kTileRows <= prefix.tokens) {
          tma_load_3d(&qkv_map, to, barrier, chunk, prefix.row + key);
        } else {
#pragma unroll 1
          for (int i = 0; i < At::kBoxes * kTileRows / kPrefixStep; ++i) {
            const int row = key + i * kPrefixStep % kTileRows;
            tma_load_3d(&atom_map, to + i * kPrefixStep * 128, barrier, chunk + i * kPrefixStep / kTileRows,
                        (row < prefix.tokens ? prefix.row : tile.first_row) + row);
          }
        }
      }
      __syncwarp();
      next.advance(1);
      ++next_box;
    }
  };
  if (fetches) {
    if (elect_one()) {
      mbarrier_arrive_expect_tx(base + At::kQueries, groups * At::kTileBytes);
      for (int i = 0; i < groups; ++i)
        tma_load_3d(&qkv_map, base + At::kQ + i * At::kTileBytes, base + At::kQueries,
                    (first_head + (shape.pairs_heads ? i : 0)) * At::kBoxes,
                    tile.first_row + tile.query + (shape.pairs_heads ? 0 : i * kTileRows));
    }
    __syncwarp();
    refill(-1);
  }

  KvPipelineState<At::kStages> keys, values;
  values.advance(1);
  // Waits for a box, and returns its address.
  const auto wait = [&](const KvPipelineState<At::kStages>& place, int box) {
    if (fetches) refill(box);
    mbarrier_wait(full + 8 * place.stage, place.uses % 2);
    return base + At::kKv + place.stage * At::kTileBytes;
  };
  const auto release = [&](KvPipelineState<At::kStages>& place) {
    if (lane == 0) mbarrier_arrive(empty + 8 * place.stage);
    place.advance(2);
  };
  const auto skip = [&](int step) {
    wait(keys, 2 * step);
    release(keys);
    wait(values, 2 * step + 1);
    release(values);
  };

  const uint32_t q_from = base + At::kQ + group * At::kTileBytes;
  float out[kDim / 2];
  float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};  // of rows lane / 4 and lane / 4 + 8 of the warp's
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) out[i] = 0.0f;
  float corrections[2];  // of a step: factors for the sums of earlier ones

  // The parts of a step. Q·Kᵀ, which is not waited for.
  const auto multiply_keys = [&](int step, auto& s) {
    const uint32_t k_from = wait(keys, 2 * step);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      const int offset = k / 4 * At::kBoxBytes + k % 4 * 32;
      wgmma<T>(s, advance_descriptor(make_descriptor(q_from), offset),
               advance_descriptor(make_descriptor(k_from), offset), k > 0);
    }
    wgmma_commit();
  };
  // Replaces scores by weights, and computes the factors for the sums of earlier steps.
  const auto weigh = [&](int step, auto& s) {
    // Hidden scores are finite (attention/warp.cuh): a row may have no key in its first steps.
    mask_window(s, window, query + warp * 16, step * kTileRows, tile.length, lane, kMaskedScore);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      corrections[half] = online_softmax(sm90::tiles(s), half, maximum[half], sum[half], scale_log2);
  };
  // Scales the sums of earlier steps, and rounds the weights of this one, as P·V's left operand.
  const auto scale_and_round = [&](const auto& s, auto& p) {
    constexpr int kKeys = sizeof(s) / sizeof(float) * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
        p[n / 2][2 * (n % 2) + half] = pack_two<T>(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]);
      rescale(sm90::tiles(out), half, corrections[half]);
    }
  };
  // P·V, which is not waited for.
  const auto multiply_values = [&](int step, const auto& p) {
    constexpr int kKeys = sizeof(p) / sizeof(p[0]) * 16;
    const int valid = tile.length - step * kTileRows;
    const uint32_t v_from = wait(values, 2 * step + 1);
    if (valid < kKeys) {
      // Each warpgroup writes the zeros that it reads; the other one writes the same values.
#pragma unroll
      for (int box = 0; box < At::kBoxes; ++box)
        clear_values<64, kKeys>(smem + (v_from - base) + box * At::kBoxBytes, valid);
      sync_group(group);
    }
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
      wgmma_rs_mn_major<T>(out, p[k], make_boxed_descriptor(v_from + k * 16 * 128, At::kBoxBytes), true);
    wgmma_commit();
  };

  mbarrier_wait(base + At::kQueries, 0);
  for (int step = block_first; step < first; ++step) skip(step);
  const bool ends_short = tile.length - (end - 1) * kTileRows <= kTileRows / 2;
  const int last = end - 1;
  const std::integral_constant<int, kTileRows> whole;
  const std::integral_constant<int, kTileRows / 2> half_step;
  if constexpr (At::kOverlaps) {
    // The products of a step with its values overlap with those of the next step with its keys, and with its softmax.
    const auto end_with = [&](const auto& p) {
      multiply_values(last, p);
      wgmma_wait_all(out);
      release(values);
    };
    const auto begin = [&](auto count) {
      constexpr int kKeys = decltype(count)::value;
      uint32_t p[kKeys / 16][4];
      {
        float s[kKeys / 2];
        multiply_keys(first, s);
        wgmma_wait_all(s);
        release(keys);
        weigh(first, s);
        scale_and_round(s, p);  // of sums that are 0
      }
      if constexpr (kKeys == kTileRows) {
        const auto next = [&](int step, auto& s, auto& next_p) {
          multiply_keys(step + 1, s);
          multiply_values(step, p);
          wgmma_wait<1>();
          fence_accumulators(s);
          release(keys);
          weigh(step + 1, s);
          wgmma_wait_all(out);
          fence_accumulators(s);  // not rounded earlier: the products read `p`
          release(values);
          scale_and_round(s, next_p);
        };
        const int whole_end = ends_short ? last - 1 : last;
        for (int step = first; step < whole_end; ++step) {
          float s[kTileRows / 2];
          next(step, s, p);
        }
        if (ends_short) {
          float s[kTileRows / 4];
          uint32_t last_p[kTileRows / 32][4];
          next(whole_end, s, last_p);
          end_with(last_p);
          return;
        }
      }
      end_with(p);
    };
    if (first == last && ends_short)
      begin(half_step);
    else
      begin(whole);
  } else {
    const auto attend = [&](int step, auto count) {
      constexpr int kKeys = decltype(count)::value;
      float s[kKeys / 2];
      uint32_t p[kKeys / 16][4];
      multiply_keys(step, s);
      wgmma_wait_all(s);
      release(keys);
      weigh(step, s);
      scale_and_round(s, p);
      multiply_values(step, p);
      wgmma_wait_all(out);
      release(values);
    };
    for (int step = first; step < last; ++step) attend(step, whole);
    ends_short ? attend(last, half_step) : attend(last, whole);
  }
  for (int step = end; step < block_end; ++step) skip(step);

  // Results pass through the warpgroup's part of Q's memory, which only this warpgroup has read.
  sync_group(group);
  const int rows = min(16, tile.tokens() - query - warp * 16);
  if (rows <= 0) return;
  clear_unseeing(sum, query + warp * 16 + lane / 4, tile.length, window);
#pragma unroll
  for (int box = 0; box < At::kBoxes; ++box)
    store_context<T, 64>(smem + (q_from - base) + box * At::kBoxBytes + warp * 16 * 128,
                         reinterpret_cast<const float (&)[32]>(out[32 * box]), sum, rows, context,
                         tile.first_row + query + warp * 16, head * At::kBoxes + box, shape.heads * At::kBoxes, lane);
}

template <typename T, int kDim, int kGroups>
__global__ void __launch_bounds__(DecoderLayout<kDim, kGroups>::kThreads, DecoderLayout<kDim, kGroups>::kBlocks)
    attention_sm90_decoder_kernel(const __grid_constant__ CUtensorMap qkv_map, const AttentionTile* tiles,
                                  DecoderHeads shape, float scale_log2, T* context, Queries queries, KeyWindow window) {
  EMBERT_SM90A("attention_sm90_decoder_kernel",
               attend_decoder_tile<T, kDim, kGroups>(qkv_map, qkv_map, tiles, NoPrefixes(), shape, scale_log2, context,
                                                     queries, window));
}

template <typename T, int kDim>
__global__ void __launch_bounds__(DecoderLayout<kDim, 2>::kThreads, DecoderLayout<kDim, 2>::kBlocks)
    attention_sm90_prefix_kernel(const __grid_constant__ CUtensorMap qkv_map,
                                 const __grid_constant__ CUtensorMap atom_map, const AttentionTile* tiles,
                                 SharedPrefixes prefixes, DecoderHeads shape, float scale_log2, T* context,
                                 Queries queries, KeyWindow window) {
  EMBERT_SM90A(
      "attention_sm90_prefix_kernel",
      attend_decoder_tile<T, kDim, 2>(qkv_map, atom_map, tiles, prefixes, shape, scale_log2, context, queries, window));
}

// Up to this many tiles of all heads, blocks of one warpgroup fit 132 multiprocessors at once. Forward passes of
// Qwen3-0.6B in µs with two and with one (H200): 64 tokens 851 and 785, 256 1 175 and 1 134, 1 024 2 802 and 2 554.
template <int kDim>
constexpr int kFewTiles = 132 * DecoderLayout<kDim, 2>::kBlocks;

template <typename T, int kDim>
Status launch_decoder(const void* qkv, int rows, const WindowedWork& work, const AttentionHeads& heads, void* context,
                      TensorMaps& maps, const Stream& stream) {
  const int group = heads.heads / heads.kv_heads;
  const CUtensorMap *map = nullptr, *atom_map = nullptr;
  EMBERT_TRY(maps.get({qkv, rows, heads.qkv_columns(), kTileRows, 64, kDim / 64}, map));
  const float scale_log2 = float(1.4426950408889634 * scale_of(heads));
  const auto run = [&](const char* name, auto groups, auto kernel, const auto&... arguments) -> Status {
    using At = DecoderLayout<kDim, decltype(groups)::value>;
    const DecoderHeads shape{heads.heads, heads.kv_heads, group, group % At::kGroups == 0};
    const int blocks = shape.pairs_heads ? heads.heads / At::kGroups : heads.heads;
    EMBERT_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, At::kSharedBytes));
    return launch(name, kernel, dim3(blocks, work.tile_count), At::kThreads, At::kSharedBytes, stream, *map,
                  arguments..., shape, scale_log2, static_cast<T*>(context), work.queries,
                  window_of(work.window, heads.causal));
  };
  constexpr std::integral_constant<int, 1> kOne{};
  constexpr std::integral_constant<int, 2> kTwo{};
  if (work.prefixes == nullptr) {
    return int64_t(heads.heads) * work.tile_count <= kFewTiles<kDim>
               ? run("attention_sm90_decoder", kOne, attention_sm90_decoder_kernel<T, kDim, 1>, work.tiles)
               : run("attention_sm90_decoder", kTwo, attention_sm90_decoder_kernel<T, kDim, 2>, work.tiles);
  }
  EMBERT_TRY(maps.get({qkv, rows, heads.qkv_columns(), kPrefixStep, 64, 1}, atom_map));
  return run("attention_sm90_prefix", kTwo, attention_sm90_prefix_kernel<T, kDim>, *atom_map, work.tiles,
             SharedPrefixes{work.prefixes});
}

}  // namespace

bool attention_sm90_decoder_supports(DType dtype, const AttentionHeads& heads) {
  return dtype != DType::kFloat32 && (heads.head_size == 64 || heads.head_size == 128 || heads.head_size == 256);
}

Status attention_sm90_decoder(DType dtype, const void* qkv, int rows, const WindowedWork& work,
                              const AttentionHeads& heads, void* context, TensorMaps& maps, const Stream& stream) {
  const auto run = [&](auto launcher) { return launcher(qkv, rows, work, heads, context, maps, stream); };
  const bool half = dtype == DType::kFloat16;
  if (heads.head_size == 64) return run(half ? launch_decoder<half_t, 64> : launch_decoder<bfloat_t, 64>);
  if (heads.head_size == 128) return run(half ? launch_decoder<half_t, 128> : launch_decoder<bfloat_t, 128>);
  return run(half ? launch_decoder<half_t, 256> : launch_decoder<bfloat_t, 256>);
}

}  // namespace embert
