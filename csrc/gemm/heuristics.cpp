#include "gemm/heuristics.h"

#include <algorithm>
#include <iterator>

namespace embert::hopper {
namespace {

// Up to so many tiles of 64 × 64 the kernel for few rows is faster: for products that widen, and for the others.
// Forwards in µs with it and in ping-pong: BERT-base at 448 rows (QKV has 252 tiles) 513 and 481, -large at 320 rows
// (240 tiles) 1 100 and 1 126.
constexpr int kFewTilesWidening = 240, kFewTiles = 160;
constexpr int kMostFewRows = 4096;  // the sums of more rows, up to four parts a group, do not fit their memory (norm.h)

// Measured a whole layer at a time (BERT-base, -large, MiniLM; 16 to 1 024 rows; each product with each tile): this
// choice loses 2.5 % of a layer to the best one. A launch should leave multiprocessors to the next one, whose W is
// copied meanwhile: at 32 rows FFN out of BERT-base is better with 24 blocks than with 48 (14.5 µs a layer against
// 16.6).
TileChoice few_tile(int rows, int out, int in) {
  const auto tile = [](int tile_rows, int columns) { return TileChoice{TileKernel::kFewRows, tile_rows, columns}; };
  const bool widens = out > in;
  if (widens && rows <= 32) return tile(rows <= 16 ? 16 : 32, in >= 1024 ? 64 : 32);
  if (widens) return tile(64, rows <= 64 ? 32 : 64);
  if (rows <= 32) return tile(rows > 16 && out == 768 ? 32 : 16, 32);
  if (rows <= 96) return tile(32, 32);
  return tile(64, rows <= 128 ? 32 : 64);
}

bool are_few(const ProductSize& product) {
  const int tiles = tiles_of(product.rows, 64) * tiles_of(product.out, 64);
  return tiles <= (product.out > product.in ? kFewTilesWidening : kFewTiles) && product.rows <= kMostFewRows;
}

// Without a residual and up to this K, tiles of 128 × 128 in turn are faster than wide ones. In µs, in turn and wide,
// for 16 384 rows: 1 536 to 4 608 columns 308 and 326, 2 048 to 6 144 columns 594 and 586.
constexpr int kMostPingPongIn = 1536;

TileChoice plain_tile(const ProductSize& product, int processors) {
  const int tiles = tiles_of(product.rows, 128) * tiles_of(product.out, 128);
  if (tiles <= processors) return {TileKernel::kShared, 128, 128};
  if (product.in > kMostPingPongIn && !product.turns_or_gates) return {TileKernel::kWide256, 128, 256};
  return {TileKernel::kPingPong, 128, 128};
}

// Cycles of a launch of the wide kernel: `step` for each round of tiles and each 64 of K, which is the matrix unit at
// 84 to 95 %, and `rest` for everything else (these only relative to each other). Over 1 280 to 26 368 rows of O and
// FFN out of BERT-base, -large and MiniLM, the choice takes 0.04 % more than the best of the three. Without kTall128 it
// takes 2.5 % more. Narrow tiles came later and are not part of that.
struct WideTile {
  TileChoice tile;
  int step, rest;
};
constexpr WideTile kWideTiles[] = {
    {{TileKernel::kWide256, 128, 256}, 1080, 6500},
    {{TileKernel::kWide128, 128, 128}, 610, 5000},
    {{TileKernel::kTall128, 192, 128}, 890, 6500},
};
// A step of kWide256's narrow tiles. In a round after four rounds of whole ones they took 0.55 to 0.60 of a whole
// tile's time (768 and 1 024 columns, K the same and four times as much).
constexpr int kNarrowStep = 630;

int cost_of(const WideTile& wide, const ProductSize& product, int clusters) {
  const int tile_rows = tiles_of(product.rows, wide.tile.rows * kCluster);
  const int across = tiles_of(product.out, wide.tile.columns);
  const int step = wide.tile.kernel == TileKernel::kWide256 ? narrowing_of(tile_rows, across, clusters).step
                                                            : tiles_of(tile_rows * across, clusters) * wide.step;
  return tiles_of(product.in, 64) * step + wide.rest;
}

TileChoice residual_tile(const ProductSize& product, int clusters) {
  const auto cheaper = [&](const WideTile& a, const WideTile& b) {
    return cost_of(a, product, clusters) < cost_of(b, product, clusters);
  };
  return std::min_element(std::begin(kWideTiles), std::end(kWideTiles), cheaper)->tile;  // the first of equals
}

}  // namespace

// What does not fit whole rounds is narrow, where it then fits one round.
Narrowing narrowing_of(int tile_rows, int across, int clusters) {
  const int whole_step = kWideTiles[0].step;
  const int tiles = tile_rows * across, rounds = tiles / clusters;
  const int narrow_rows = tiles_of(tiles % clusters, across);
  const bool fits = tiles + narrow_rows * across <= (rounds + 1) * clusters;  // narrow tiles are twice as many
  if (narrow_rows == 0 || !fits) return {tile_rows, tiles_of(tiles, clusters) * whole_step};
  return {tile_rows - narrow_rows, rounds * whole_step + kNarrowStep};
}

TileChoice choose_tile(const ProductSize& product, int processors) {
  if (are_few(product) && product.in % 64 == 0) return few_tile(product.rows, product.out, product.in);
  if (product.residual) return residual_tile(product, processors / kCluster);
  return plain_tile(product, processors);
}

// With 8 bits and up to this K, tiles of 64 × 256 in turn are faster than kWide256. In a forward of BERT-large, µs for
// 16 384 rows of 1 024 columns, wide and in turn: K = 1 024 57.8 and 51.0, K = 4 096 126.9 and 131.0, which contain the
// wait for the kernel before.
constexpr int kMostTurnsIn = 1024;

// Costs are those of 16 bits: a step has the same bytes and takes the matrix unit as long. For few rows, too, tiles are
// those of 16 bits, which is not measured.
TileChoice choose_int8_tile(const ProductSize& product, int processors) {
  if (are_few(product)) {
    TileChoice few = few_tile(product.rows, product.out, product.in);
    if (product.residual) few.columns = 32;  // of 64 columns registers do not hold the scales, too
    return few;
  }
  const ProductSize in_steps{product.rows, product.out, (product.in + 1) / 2, product.residual, true};
  if (!product.residual) return plain_tile(in_steps, processors);
  const TileChoice wide = residual_tile(in_steps, processors / kCluster);
  const bool turns = wide.kernel == TileKernel::kWide256 && product.out % 256 == 0 && product.in <= kMostTurnsIn;
  return turns ? TileChoice{TileKernel::kTurns256, 64, 256} : wide;
}

}  // namespace embert::hopper
