// Selects the kernel and the tile of a GEMM on Hopper. Host code that depends only on sizes. Tiles change no bits, so a
// choice among those that a GEMM has affects only time.
// Measurements: H100, 132 multiprocessors.
#pragma once

#include <cstddef>

namespace embert::sm90 {

// Blocks of the kernels for many rows run in clusters of two, one below the other in y. Each has its own rows, and they
// share the tile of W: each loads half of it for both (multicast). docs/experiments.md has measurements of larger
// clusters and of blocks side by side.

constexpr int kCluster = 2;

constexpr int tiles_of(int size, int tile) {
  return (size + tile - 1) / tile;
}

enum class GemmKernel : int {
  kSmallM = 0,              // small_m.cuh
  kPingPong = 1,            // pingpong.cuh, consumers in ping-pong
  kShared = 2,              // pingpong.cuh, both consumers on each tile
  kCooperative256 = 3,      // cooperative.cuh, 128 × 256
  kCooperative128 = 4,      // cooperative.cuh, 128 × 128
  kCooperative192x128 = 5,  // cooperative.cuh, 192 × 128: for tile counts that fit one wave only with it
  kPingPong256 = 6,         // residual_pingpong.cuh, 64 × 256, consumers in ping-pong; int8 only
};

struct GemmConfig {
  GemmKernel kernel;
  int rows, columns;  // of a block's tile
};

struct GemmShape {
  int m, n, k;  // n: W's rows; with gates two for each column of y
  bool residual;
  bool rope_or_gated = false;  // only kSmallM, kPingPong and kShared support it
};

GemmConfig choose_config(const GemmShape& shape, int num_sms);

// The same with int8 operands, whose steps are 128 columns of K.
GemmConfig choose_int8_config(const GemmShape& shape, int num_sms);

// The number of rows of kCooperative256's tiles that are whole, the others being narrow (NarrowingTileScheduler), and
// the resulting cycles per step.
struct Narrowing {
  int full_rows, step;
};
Narrowing narrowing_of(int tile_rows, int across, int clusters);

// Shared memory of a small M block: half of a multiprocessor's 227 KB, so that the next kernel's blocks fit too.
constexpr int kSmallMBytes = 113 * 1024;
// The same where a launch has at most one block per multiprocessor and over 64 rows: the pipeline has to cover the
// memory latency.
constexpr int kSmallMMaxBytes = 227 * 1024;

// Up to this many rows a launch prefetches weights into the L2 cache, for the second GEMM after it: the memory is idle
// then. BERT-base, µs a layer without and with it: 16 rows 15.4 and 14.4, 64 rows 18.2 and 17.4, but 128 rows 20.8 and
// 21.1.
constexpr int kPrefetchRows = 64;

// From this many rows on, the feed-forward layer with hidden size 384 is one kernel, whose blocks have 128 rows each. A
// forward pass of MiniLM-L6 takes 742 µs with it and 706 with two kernels at 11 264 tokens, 912 and 980 at 16 384.
constexpr int kFusedFeedForwardRows = 12800;

// Maxima over texts (gemm/kernels/maxima.cuh): tiles of columns in a band, for rows of `in` elements. 16 MB of W stay
// in the L2 cache (50 MB on an H100, in two halves that keep copies of each other's lines) together with the current
// rows.
constexpr size_t kBandBytes = size_t(16) << 20;
inline int maxima_band(int in) {
  const size_t tile = size_t(128) * in * 2;
  return kBandBytes > tile ? int(kBandBytes / tile) : 1;
}

}  // namespace embert::sm90
