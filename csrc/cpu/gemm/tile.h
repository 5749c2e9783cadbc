// Tiling of a GEMM: tiles in registers, panels of the weight's columns, and blocks of rows. Attention uses it, too.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cpu/simd.h"
#include "cpu/thread_pool.h"

namespace embert::cpu::EMBERT_ISA {

constexpr int kTileColumns = kTileVectors * kLanes;

// Products in one partial sum. Longer sums are sums of these: for 1 536 products their error is 3 times smaller, for 1
// % of the time.
constexpr int kPartialDepth = 128;

// Asks for the cache lines of `kVectors` registers, into the L2 cache. Memory is slower than the products of a tile,
// and the CPU's own prefetch stops at each page.
template <int kVectors, typename Element>
inline void prefetch(const Element* from) {
  for (int byte = 0; byte < int(kVectors * sizeof(Floats)); byte += 64) {
    __builtin_prefetch(reinterpret_cast<const char*>(from) + byte, 0, 2);
  }
}

// sums[row][lane] += Σₖ a[row · a_stride + k] · b[k · b_stride + kLanes · v + lane] for k < depth, in order.
//
// `ahead`, unless it is 0, is the distance from b to what is multiplied next.
template <int kRows, int kVectors>
inline void add_products(const float* a, std::ptrdiff_t a_stride, const float* b, std::ptrdiff_t b_stride, int depth,
                         Floats (&sums)[kRows][kVectors], std::ptrdiff_t ahead = 0) {
  for (int k = 0; k < depth; ++k, b += b_stride) {
    if (ahead) prefetch<kVectors>(b + ahead);
    Floats b_values[kVectors];
    for (int v = 0; v < kVectors; ++v) b_values[v] = load(b + v * kLanes);
    for (int row = 0; row < kRows; ++row) {
      const Floats a_value = broadcast(a[row * a_stride + k]);
      for (int v = 0; v < kVectors; ++v) {
        sums[row][v] = fma(a_value, b_values[v], sums[row][v]);
      }
    }
  }
}

template <int kRows, int kVectors>
inline void set_zero(Floats (&sums)[kRows][kVectors]) {
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) sums[row][v] = zero();
  }
}

// sums[row][lane] = Σₖ a[row · a_stride + k] · b[k · b_stride + kLanes · v + lane]: in an order that depends only on
// `depth` and on `first`, the products in the first partial sum, not on the tile's size. So a row's sums are
// batch-invariant.
template <int kRows, int kVectors>
inline void multiply(const float* a, std::ptrdiff_t a_stride, const float* b, std::ptrdiff_t b_stride, int depth,
                     Floats (&sums)[kRows][kVectors], int first = kPartialDepth, std::ptrdiff_t ahead = 0) {
  set_zero(sums);
  add_products<kRows, kVectors>(a, a_stride, b, b_stride, depth < first ? depth : first, sums, ahead);
  for (int k = first; k < depth; k += kPartialDepth) {
    Floats run[kRows][kVectors];
    set_zero(run);
    const int left = depth - k;
    add_products<kRows, kVectors>(a + k, a_stride, b + k * b_stride, b_stride,
                                  left < kPartialDepth ? left : kPartialDepth, run, ahead);
    for (int row = 0; row < kRows; ++row) {
      for (int v = 0; v < kVectors; ++v) sums[row][v] += run[row][v];
    }
  }
}

// Calls function(std::integral_constant<int, n>) for n = number, 1 to kMax.
template <int kMax, typename Function>
inline void with_constant(int number, const Function& function) {
  if constexpr (kMax > 0) {
    if (number == kMax) {
      function(std::integral_constant<int, kMax>());
    } else {
      with_constant<kMax - 1>(number, function);
    }
  }
}

// The rows of tile number `tile` of `tiles` that share `rows` as evenly as they can: the first, and how many.
struct TileRows {
  int first, count;
};

inline TileRows tile_rows(int rows, int tiles, int tile) {
  const int base = rows / tiles, remainder = rows % tiles;
  return {tile * base + (tile < remainder ? tile : remainder), base + (tile < remainder)};
}

// Elements of rows for which one thread suffices: 0.8 µs on Zen 4 to normalize them, 1.2 to quantize them.
constexpr int kMaxSerialElements = 3 << 10;

// Calls function(row) for each of `rows` rows: a piece for each thread, unless pieces would be too small.
template <typename Function>
inline void for_rows(int rows, int columns, int threads, const Function& function) {
  const std::int64_t most = std::min<std::int64_t>(std::int64_t{rows} * columns / kMaxSerialElements, rows);
  const int pieces = static_cast<int>(std::clamp<std::int64_t>(most, 1, std::max(threads, 1)));
  ThreadPool::shared().run(threads, pieces, [&](int piece) {
    const TileRows range = tile_rows(rows, pieces, piece);
    for (int row = range.first; row < range.first + range.count; ++row) function(row);
  });
}

// Rows that one thread multiplies by a panel of the weight: their part of x stays in its L2 cache with the panel.
constexpr int kBlockRows = 96;

// Where threads have few tasks, the product of a block and a panel is divided further if its sums are long, so that no
// thread waits long for the last one: 96 rows and 384 products take 35 µs at 67 products a nanosecond.
constexpr int kFewTasks = 8;  // of a thread
constexpr int kTaskDepth = 384, kMaxParts = 4;

inline int panels_of(int columns) {
  return (columns + kTileColumns - 1) / kTileColumns;
}

// The number of elements before a column's panel.
inline std::size_t panel_offset(int column, int depth) {
  return std::size_t(column / kTileColumns) * depth * kTileColumns;
}

// Strips of a panel, for products of few rows in float32. Only with AVX-512 is a panel wide enough: a strip is two
// cache lines wide there.
constexpr int kStrips = kLanes >= 16 ? 2 : 1;
constexpr double kStripUtilization = 0.8;  // of threads; panels are divided where it is less

// Prefetch distance. A panel: to the next panel, which the same thread multiplies. A strip: 16 steps of the product,
// because its thread has few strips.
template <int kVectors>
inline std::ptrdiff_t floats_ahead(int depth) {
  return std::ptrdiff_t{kVectors == kTileVectors ? depth : 16} * kTileColumns;
}

// The share of threads that have a task, where `tasks` tasks are run in as few waves as possible.
inline double utilization(int tasks, int threads) {
  const int waves = (tasks + threads - 1) / threads;
  return double(tasks) / (waves * threads);
}

// How many blocks to divide rows into, of `min_blocks` to `max_blocks`: the number with the best utilization, where
// each block is `tasks` tasks.
inline int balanced_blocks(int min_blocks, int max_blocks, int tasks, int threads) {
  int best = min_blocks;
  double best_utilization = 0;
  for (int blocks = min_blocks; blocks <= max_blocks && best_utilization < 0.97; ++blocks) {
    if (utilization(blocks * tasks, threads) > best_utilization) {
      best = blocks;
      best_utilization = utilization(blocks * tasks, threads);
    }
  }
  return best;
}

// Calls function(column, first row, rows, registers of columns) for each tile of a product with `out` columns and sums
// of `depth` products; both counts are std::integral_constant. Adjacent tasks share a panel, and then a block: so do
// those of a thread.
template <int kRows, int kMaxStrips, typename Function>
inline void for_tiles(int rows, int out, int depth, int threads, const Function& function) {
  constexpr int kMinRows = 2 * kRows;
  const int panels = panels_of(out), min_blocks = (rows + kBlockRows - 1) / kBlockRows;
  const int max_blocks = std::max(min_blocks, std::min(4 * min_blocks, rows / kMinRows));
  const bool few = threads > 1 && min_blocks * panels < kFewTasks * threads;
  const int max_parts = few ? std::min((depth + kTaskDepth - 1) / kTaskDepth, kMaxParts) : 1;
  const int blocks = balanced_blocks(min_blocks, max_blocks, panels * max_parts, threads);
  const int parts = std::clamp(rows / (blocks * kMinRows), 1, max_parts);
  const int tasks = blocks * panels * parts;
  const double busy = utilization(tasks, threads);
  const bool striped = few && busy < kStripUtilization && utilization(kMaxStrips * tasks, threads) > busy;
  const int strips = striped ? kMaxStrips : 1;
  ThreadPool::shared().run(threads, tasks * strips, [&](int task) {
    const int strip = task % strips, part = task / strips % parts, panel = task / strips / parts % panels;
    const TileRows block = tile_rows(rows, blocks, task / strips / parts / panels);
    const TileRows own = tile_rows(block.count, parts, part);
    const int column = panel * kTileColumns + strip * (kTileColumns / kMaxStrips);
    const int tiles = (own.count + kRows - 1) / kRows;
    for (int tile = 0; tile < tiles; ++tile) {
      const TileRows range = tile_rows(own.count, tiles, tile);
      const int first = block.first + own.first + range.first;
      with_constant<kRows>(range.count, [&](auto count) {
        if (kMaxStrips == 1 || strips == 1) {
          function(column, first, count, std::integral_constant<int, kTileVectors>());
        } else {
          function(column, first, count, std::integral_constant<int, kTileVectors / kMaxStrips>());
        }
      });
    }
  });
}

}  // namespace embert::cpu::EMBERT_ISA
