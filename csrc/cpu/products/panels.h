// Tiling of a product: panels of the weight's columns, blocks of rows, and tiles of both in registers.
#pragma once

#include <algorithm>

#include "cpu/registers/tile.h"
#include "cpu/thread_pool.h"

namespace embert::cpu {

// Rows that one thread multiplies by a panel of the weight: their part of x stays in its L2 cache with the panel.
constexpr int kBlockRows = 96;

inline int panels_of(int columns) {
  return (columns + kTileColumns - 1) / kTileColumns;
}

// How many blocks to divide rows into, of `least` to `most`: the number that leaves the fewest threads without a task
// in the last wave, where each block is `tasks` tasks.
inline int balanced_blocks(int least, int most, int tasks, int threads) {
  int best = least;
  double best_share = 0;
  for (int blocks = least; blocks <= most && best_share < 0.97; ++blocks) {
    const int count = blocks * tasks, rounds = (count + threads - 1) / threads;
    const double share = double(count) / (rounds * threads);
    if (share > best_share) {
      best = blocks;
      best_share = share;
    }
  }
  return best;
}

// Calls function(panel, first row, std::integral_constant of its rows) for each tile of a product with `out` columns.
template <typename Function>
inline void for_tiles(int rows, int out, int threads, const Function& function) {
  const int panels = panels_of(out), least = (rows + kBlockRows - 1) / kBlockRows;
  const int most = std::max(least, std::min(4 * least, rows / (2 * kTileRows)));
  const int blocks = balanced_blocks(least, most, panels, threads);
  ThreadPool::shared().run(threads, panels * blocks, [&](int task) {
    const TileRows block = tile_rows(rows, blocks, task / panels);
    const int tiles = (block.count + kTileRows - 1) / kTileRows;
    for (int tile = 0; tile < tiles; ++tile) {
      const TileRows range = tile_rows(block.count, tiles, tile);
      with_constant<kTileRows>(range.count,
                               [&](auto count) { function(task % panels, block.first + range.first, count); });
    }
  });
}

}  // namespace embert::cpu
