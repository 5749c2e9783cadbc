#include "gemm/heuristics.h"

#include <algorithm>
#include <iterator>

namespace embert::sm90 {
namespace {

// Up to this many tiles of 64 × 64 the small M kernel is faster: for GEMMs with more columns out than in, for those of
// them with up to kFewRows rows, and for the others. Forward passes in µs with it and in ping-pong: BERT-base at 448
// rows (QKV has 252 tiles) 513 and 481, -large at 320 rows (240 tiles) 1 100 and 1 126. A layer of Qwen3-0.6B at 256
// rows (QKV has 256 tiles): 46.7 and 48.7 (H200).
constexpr int kSmallMTilesWidening = 240, kSmallMTilesFewRows = 264, kSmallMTiles = 160;
constexpr int kFewRows = 256;
constexpr int kMaxSmallM = 4096;  // statistics of more rows, up to four parts a group, do not fit their memory (norm.h)

// Measured for a whole layer at a time (BERT-base, -large, MiniLM; 16 to 1 024 rows; each GEMM with each tile): this
// choice is 2.5 % of a layer slower than the best one. A launch should leave multiprocessors for the next one, whose W
// is loaded meanwhile: at 32 rows FFN out of BERT-base is better with 24 blocks than with 48 (14.5 µs a layer against
// 16.6).
// `wide_rows`: up to this number of rows tiles have 64 columns from K = 1 024 on, up to 32 from K = 2 048 on, where y
// is wider than x. With K = 1 024 and a text of 32 tokens, µs a forward pass with 64 and 32 columns: BERT-large 523 and
// 475; Qwen3-0.6B 853 and 742, in another process 896 and 886. With 16 tokens BERT-large 460 and 447, Qwen3-0.6B 667
// and 718.
constexpr int kWideRows = 16, kWideInt8Rows = 32;  // the latter is not measured

// Over 128 rows and from this K on, where y is not wider than x, tiles have 32 columns as long as a multiprocessor has
// at most one. µs a layer with 64 and 32 columns (H200): FFN out of BERT-base at 320 rows 37.9 and 36.4, of -large at
// 199 rows 39.8 and 38.6, both such GEMMs of Qwen3-0.6B at 199 rows 48.0 and 46.5; with more tiles, -large at 320 rows,
// 49.2 and 54.0; with K = 1 024, O of -large at 199 rows, 39.8 and 43.0.
constexpr int kNarrowK = 2048;

GemmConfig small_m_config(const GemmShape& shape, int wide_rows, int num_sms) {
  const int rows = shape.m, out = shape.n, in = shape.k;
  const auto tile = [](int tile_rows, int columns) { return GemmConfig{GemmKernel::kSmallM, tile_rows, columns}; };
  const bool widens = out > in;
  if (widens && rows <= 32) return tile(rows <= 16 ? 16 : 32, in >= (rows <= wide_rows ? 1024 : 2048) ? 64 : 32);
  if (widens) return tile(64, rows <= 64 ? 32 : 64);
  if (rows <= 32) return tile(rows > 16 && out == 768 ? 32 : 16, 32);
  if (rows <= 96) return tile(32, 32);
  const bool is_one_wave = tiles_of(rows, 64) * tiles_of(out, 32) <= num_sms;
  return tile(64, rows <= 128 || (in >= kNarrowK && is_one_wave) ? 32 : 64);
}

bool is_small_m(const GemmShape& shape) {
  const int tiles = tiles_of(shape.m, 64) * tiles_of(shape.n, 64);
  const int most = shape.n <= shape.k ? kSmallMTiles : shape.m <= kFewRows ? kSmallMTilesFewRows : kSmallMTilesWidening;
  return tiles <= most && shape.m <= kMaxSmallM;
}

// Without a residual and up to this K, ping-pong tiles of 128 × 128 are faster than cooperative ones. In µs, ping-pong
// and cooperative, for 16 384 rows: 1 536 to 4 608 columns 308 and 326, 2 048 to 6 144 columns 594 and 586.
constexpr int kMaxPingPongK = 1536;

GemmConfig plain_config(const GemmShape& shape, int num_sms) {
  const int tiles = tiles_of(shape.m, 128) * tiles_of(shape.n, 128);
  if (tiles <= num_sms) return {GemmKernel::kShared, 128, 128};
  if (shape.k > kMaxPingPongK && !shape.rope_or_gated) return {GemmKernel::kCooperative256, 128, 256};
  return {GemmKernel::kPingPong, 128, 128};
}

// Cycles of a launch of the cooperative kernel: `step` for each wave of tiles and each 64 of K, which is the tensor
// cores at 84 to 95 %, and `rest` for everything else (values are relative to each other). Over 1 280 to 26 368 rows of
// O and FFN out of BERT-base, -large and MiniLM, the choice takes 0.04 % more than the best of the three. Without
// kCooperative192x128 it takes 2.5 % more. Narrow tiles are not part of that measurement.
struct CooperativeTile {
  GemmConfig tile;
  int step, rest;
};
constexpr CooperativeTile kCooperativeTiles[] = {
    {{GemmKernel::kCooperative256, 128, 256}, 1080, 6500},
    {{GemmKernel::kCooperative128, 128, 128}, 610, 5000},
    {{GemmKernel::kCooperative192x128, 192, 128}, 890, 6500},
};
// A step of kCooperative256's narrow tiles. In a wave after four waves of whole tiles they took 0.55 to 0.60 of a whole
// tile's time (768 and 1 024 columns, K the same and four times as much).
constexpr int kNarrowStep = 630;

int cost_of(const CooperativeTile& wide, const GemmShape& shape, int clusters) {
  const int tile_rows = tiles_of(shape.m, wide.tile.rows * kCluster);
  const int across = tiles_of(shape.n, wide.tile.columns);
  const int step = wide.tile.kernel == GemmKernel::kCooperative256 ? narrowing_of(tile_rows, across, clusters).step
                                                                   : tiles_of(tile_rows * across, clusters) * wide.step;
  return tiles_of(shape.k, 64) * step + wide.rest;
}

GemmConfig residual_config(const GemmShape& shape, int clusters) {
  const auto is_cheaper = [&](const CooperativeTile& a, const CooperativeTile& b) {
    return cost_of(a, shape, clusters) < cost_of(b, shape, clusters);
  };
  return std::min_element(std::begin(kCooperativeTiles), std::end(kCooperativeTiles), is_cheaper)
      ->tile;  // the first of equal ones
}

}  // namespace

// Rows beyond whole waves get narrow tiles, where these then fit one wave.
Narrowing narrowing_of(int tile_rows, int across, int clusters) {
  const int full_step = kCooperativeTiles[0].step;
  const int tiles = tile_rows * across, rounds = tiles / clusters;
  const int narrow_rows = tiles_of(tiles % clusters, across);
  const bool fits = tiles + narrow_rows * across <= (rounds + 1) * clusters;  // narrow tiles are twice as many
  if (narrow_rows == 0 || !fits) return {tile_rows, tiles_of(tiles, clusters) * full_step};
  return {tile_rows - narrow_rows, rounds * full_step + kNarrowStep};
}

GemmConfig choose_config(const GemmShape& shape, int num_sms) {
  if (is_small_m(shape) && shape.k % 64 == 0) return small_m_config(shape, kWideRows, num_sms);
  if (shape.residual) return residual_config(shape, num_sms / kCluster);
  return plain_config(shape, num_sms);
}

// With int8 and up to this K, ping-pong tiles of 64 × 256 are faster than kCooperative256. In a forward pass of
// BERT-large, µs for 16 384 rows of 1 024 columns, cooperative and ping-pong: K = 1 024 57.8 and 51.0, K = 4 096 126.9
// and 131.0, which contain the wait for the previous kernel.
constexpr int kMaxInt8PingPongK = 1024;

// Costs are those of 16 bits: a step has the same bytes and the same time on the tensor cores. Small M tiles, too, are
// those of 16 bits, which is not measured.
GemmConfig choose_int8_config(const GemmShape& shape, int num_sms) {
  if (is_small_m(shape)) {
    GemmConfig few = small_m_config(shape, kWideInt8Rows, num_sms);
    if (shape.residual) few.columns = 32;  // with 64 columns the scales do not fit the registers
    return few;
  }
  // As if with RoPE or gates, which keeps plain_config from kCooperative256: it has no such kernel in int8.
  const GemmShape in_steps{shape.m, shape.n, (shape.k + 1) / 2, shape.residual, true};
  if (!shape.residual) return plain_config(in_steps, num_sms);
  const GemmConfig wide = residual_config(in_steps, num_sms / kCluster);
  const bool use_pingpong =
      wide.kernel == GemmKernel::kCooperative256 && shape.n % 256 == 0 && shape.k <= kMaxInt8PingPongK;
  return use_pingpong ? GemmConfig{GemmKernel::kPingPong256, 64, 256} : wide;
}

}  // namespace embert::sm90
