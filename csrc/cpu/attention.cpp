#include <algorithm>
#include <atomic>
#include <cstdint>

#include "cpu/functions.h"
#include "cpu/gemm/tile.h"
#include "cpu/memory.h"
#include "cpu/simd.h"
#include "cpu/thread_pool.h"

namespace embert::cpu::EMBERT_ISA {
namespace {

// Queries of a head that one task processes. It copies the keys and values that they attend to, so more queries share
// the copies: of 8 192 tokens a head of 64 columns takes a quarter less with 384 than with 96. In a window they would
// attend to more keys.
constexpr int kQueries = 96, kLongQueries = 384;
constexpr int kLongTokens = 1024;
// Products that one thread computes in some 20 µs: a second thread would gain nothing.
constexpr std::int64_t kMaxSerial = 1 << 19;
// Values of more keys are copied too: in place, they are kilobytes apart.
constexpr int kMinCopiedKeys = 64;

int round_up(int count) {
  return (count + kLanes - 1) / kLanes * kLanes;
}

// Rows of one head, `stride` apart.
struct HeadRows {
  const float* first;
  std::ptrdiff_t stride;

  const float* operator()(int row) const { return first + row * stride; }
};

// Keys or values of one head, by position: those of the prefix, then the sequence's own.
struct KeyRows {
  HeadRows prefix, own;
  int shared;  // tokens of the prefix

  const float* operator()(int row) const { return row < shared ? prefix(row) : own(row - shared); }
};

// A row [size] of queries or keys after RoPE: in `to`, or in place without RoPE.
const float* rotated(const float* row, int position, const Positions& positions, int size, float* to) {
  if (!positions.cosines) return row;
  const int half = positions.rotary_dim;
  const float* const cosines = positions.cosines + std::ptrdiff_t(position) * half;
  const float* const sines = positions.sines + std::ptrdiff_t(position) * half;
  for (int i = 0; i < half; ++i) {
    const float low = row[i], high = row[i + half];
    to[i] = low * cosines[i] - high * sines[i];
    to[i + half] = high * cosines[i] + low * sines[i];
  }
  std::copy(row + 2 * half, row + size, to + 2 * half);
  return to;
}

// Rotated keys first … first + count - 1 → panels [size, 64] side by side, the last one as wide as whole registers
// need, with zeros after the last key. `rows` [16, size] is scratch memory.
void transpose(const KeyRows& keys, int first, int count, const Positions& positions, int size, float* rows,
               float* to) {
  for (; count > 0; first += kTileColumns, count -= kTileColumns) {
    const int tile_size = std::min(kTileColumns, count), padded_size = round_up(tile_size);
    for (int key = 0; key < padded_size; key += kLanes) {
      const int valid_rows = std::min(kLanes, tile_size - key), number = first + key;
      HeadRows from{keys(number), keys.own.stride};
      if (positions.cosines) {
        for (int i = 0; i < valid_rows; ++i) rotated(keys(number + i), number + i, positions, size, rows + i * size);
        from = {rows, size};
      } else if (number < keys.shared && number + valid_rows > keys.shared) {
        for (int i = 0; i < valid_rows; ++i) std::copy_n(keys(number + i), size, rows + i * size);
        from = {rows, size};
      }
      for (int k = 0; k < size; k += kLanes)
        transpose_tile(from(0) + k, from.stride, valid_rows, to + k * padded_size + key, padded_size);
    }
    to += size * padded_size;
  }
}

// The keys that queries first … first + count - 1 attend to: begin … end - 1.
struct Reach {
  int begin, end;

  Reach(const Positions& positions, int first, int count, int keys) {
    begin = positions.window < 0 ? 0 : std::min(keys, std::max(0, first - positions.window));
    const int last = first + count - 1;
    const int reached = positions.causal ? last : positions.window < 0 ? keys - 1 : last + positions.window;
    end = std::max(begin, std::min(keys, reached + 1));
  }
};

// scores [count] of keys from `first` on, for one query → exp(score - the largest one); returns one over their sum.
float softmax_terms(float* scores, int first, int count, const float* bias, const Reach& reach) {
  if (reach.begin == reach.end) {  // it attends to no key
    std::fill(scores, scores + count, 0.0f);
    return 0.0f;
  }
  const bool bounded = reach.begin > first || reach.end < first + count;
  const Floats lowest = broadcast(-__builtin_inff());
  const auto biased_score = [&](int offset) {
    Floats score = load(scores + offset);  // scores end with a whole register
    if (bias) score += load(bias + first + offset, count - offset);
    if (bounded) {
      const int from = reach.begin - first - offset, to = reach.end - first - offset;
      score = where_first(to, where_first(from, lowest, score), lowest);
    }
    return score;
  };
  Floats maxima = lowest;
  for (int offset = 0; offset < count; offset += kLanes) {
    maxima = where_first(count - offset, maximum(maxima, biased_score(offset)), maxima);
  }
  const Floats highest = broadcast(largest(maxima));
  Floats sums = zero();
  for (int offset = 0; offset < count; offset += kLanes) {
    Floats value[] = {biased_score(offset) - highest};
    exp(value);
    store(scores + offset, value[0], count - offset);
    sums = where_first(count - offset, sums + value[0], sums);
  }
  return 1.0f / sum(sums);
}

// The columns of a table of distances that queries first_query … last_query have for keys first_key … last_key: from a
// whole register on.
struct Columns {
  int first, count;  // multiples of kLanes

  Columns(const DistanceRows& distances, int first_query, int last_query, int first_key, int last_key) {
    const std::int32_t* const row_of = distances.row_of + distances.longest - 1;
    first = row_of[last_key - first_query] / kLanes * kLanes;
    count = round_up(row_of[first_key - last_query] + 1 - first);
  }
};

// The products of kRows rows with `columns` of one head's table [size, distances.columns], to rows `stride` apart.
template <int kRows>
void multiply_columns(const HeadRows& rows, const float* table, int table_columns, const Columns& columns, int size,
                      float* to, std::ptrdiff_t stride) {
  for (int offset = 0; offset < columns.count; offset += kTileColumns) {
    with_constant<kTileVectors>(std::min(kTileColumns, columns.count - offset) / kLanes, [&](auto lanes) {
      constexpr int kVectors = lanes;
      Floats sums[kRows][kVectors];
      set_zero(sums);
      add_products<kRows, kVectors>(rows.first, rows.stride, table + columns.first + offset, table_columns, size, sums);
      for (int row = 0; row < kRows; ++row) {
        for (int v = 0; v < kVectors; ++v) store(to + row * stride + offset + v * kLanes, sums[row][v]);
      }
    });
  }
}

// What disentangled attention adds to the scores of a task's queries. Keys are multiplied once for all of them.
struct DistanceProducts {
  const DistanceRows& distances;
  const float* keys;     // of this head
  const float* of_keys;  // of each key with the rows of its distances, one after the other; null: the part is absent
  const std::int32_t* base;  // of each key: where its product with row 0 would be

  // Adds to scores [count] of the keys of `query`, whose products `of_query` begin with the row `first`.
  void add_to(float* scores, int count, int query, const float* of_query, int first) const {
    const std::int32_t* const row_of = distances.row_of + distances.longest - 1 - query;
    for (int key = 0; key < count; key += kLanes) {
      const int left = count - key;
      const Ints rows = load_ints(row_of + key, left);
      Floats score = load(scores + key, left);
      if (keys) score += gather(of_query, rows - first, left);
      if (of_keys) score += gather(of_keys, rows + load_ints(base + key, left), left);
      store(scores + key, score, left);
    }
  }
};

// The products of `keys` keys with the rows of their distances from queries first … last, in a thread's memory.
DistanceProducts distance_products(const DistanceRows& distances, int head, const HeadRows& k, int keys, int size,
                                   int first, int last) {
  const std::ptrdiff_t table = std::ptrdiff_t(head) * size * distances.columns;
  const float* const of_head = distances.keys ? distances.keys + table : nullptr;
  if (!distances.queries) return {distances, of_head, nullptr, nullptr};
  struct Kernel;
  std::int32_t* const base = scratch<std::int32_t, Kernel>(keys);
  std::size_t total = 0;
  const int tiles = (keys + kTileRows - 1) / kTileRows;
  for (int tile = 0; tile < tiles; ++tile) {
    const int key = tile * kTileRows, last_key = std::min(keys, key + kTileRows) - 1;
    const Columns columns(distances, first, last, key, last_key);
    for (int i = key; i <= last_key; ++i, total += columns.count) base[i] = std::int32_t(total) - columns.first;
  }
  float* const products = scratch<float, Kernel>(total);
  for (int tile = 0; tile < tiles; ++tile) {
    const int key = tile * kTileRows, last_key = std::min(keys, key + kTileRows) - 1;
    const Columns columns(distances, first, last, key, last_key);
    with_constant<kTileRows>(last_key + 1 - key, [&](auto rows) {
      multiply_columns<rows>({k(key), k.stride}, distances.queries + table, distances.columns, columns, size,
                             products + base[key] + columns.first, columns.count);
    });
  }
  return {distances, of_head, products, base};
}

// The common data of a task's queries: one head of one sequence.
struct Head {
  const Positions& positions;
  const float* bias;  // of this head and query 0: of key j at j
  int size;
  const float* keys;  // transposed
  HeadRows values;
  int first, count;  // the keys
  const DistanceProducts* distances;
};

// Of up to 6 queries, the first of which has index `query`: rotated q [kRows, size] against the keys, and the weighted
// sums of the values. `scores` [kRows, count rounded up] is scratch.
template <int kRows>
void attend_rows(const Head& head, const HeadRows& q, int query, float* scores, float* context, std::ptrdiff_t stride) {
  const int padded = round_up(head.count);
  for (int offset = 0; offset < padded; offset += kTileColumns) {
    with_constant<kTileVectors>(std::min(kTileColumns, padded - offset) / kLanes, [&](auto lanes) {
      constexpr int kVectors = lanes;
      Floats sums[kRows][kVectors];
      const float* const keys = head.keys + std::ptrdiff_t(offset) * head.size;
      set_zero(sums);  // a head has few columns: one partial sum
      add_products<kRows, kVectors>(q.first, q.stride, keys, kVectors * kLanes, head.size, sums);
      for (int row = 0; row < kRows; ++row) {
        for (int v = 0; v < kVectors; ++v) {
          store(scores + row * padded + offset + v * kLanes, sums[row][v]);
        }
      }
    });
  }
  if (head.distances) {  // there is no window: the first key is 0
    struct Kernel;
    const DistanceRows& rows = head.distances->distances;
    const Columns columns(rows, query, query + kRows - 1, 0, head.count - 1);
    float* const of_queries = scratch<float, Kernel>(std::size_t(kTileRows) * rows.columns);
    if (head.distances->keys) {
      multiply_columns<kRows>(q, head.distances->keys, rows.columns, columns, head.size, of_queries, columns.count);
    }
    for (int row = 0; row < kRows; ++row) {
      head.distances->add_to(scores + row * padded, head.count, query + row, of_queries + row * columns.count,
                             columns.first);
    }
  }
  Floats inverse_sums[kRows];
  for (int row = 0; row < kRows; ++row) {
    const float* const bias = head.bias ? head.bias - query - row : nullptr;
    const Reach reach(head.positions, query + row, 1, head.first + head.count);
    const float inverse_sum = softmax_terms(scores + row * padded, head.first, head.count, bias, reach);
    inverse_sums[row] = broadcast(inverse_sum);
  }
  for (int offset = 0; offset < head.size; offset += kTileColumns) {
    with_constant<kTileVectors>(std::min(kTileColumns, head.size - offset) / kLanes, [&](auto lanes) {
      constexpr int kVectors = lanes;
      Floats sums[kRows][kVectors];
      multiply<kRows, kVectors>(scores, padded, head.values.first + offset, head.values.stride, head.count, sums,
                                kPartialDepth - head.first % kPartialDepth);
      for (int row = 0; row < kRows; ++row) {
        for (int v = 0; v < kVectors; ++v) {
          float* const to = context + row * stride + offset + v * kLanes;
          store(to, sums[row][v] * inverse_sums[row]);
        }
      }
    });
  }
}

// Whose keys and values a thread has copied last. Its tasks are adjacent, so most blocks of a head find them copied,
// and most sequences those of their prefix.
struct Copied {
  std::uint64_t call = 0;  // of `attend`
  const float *prefix = nullptr, *own = nullptr;
  int from = 0, to = 0;

  // Number of the keys that `wanted` has in common with these: all, or the whole panels of a prefix of `shared` tokens.
  int common(const Copied& wanted, int shared) const {
    if (*this == wanted) return to - from;
    if (call != wanted.call || prefix != wanted.prefix || from != wanted.from) return 0;
    return std::max(0, std::min({shared, to, wanted.to}) - from) / kTileColumns * kTileColumns;
  }

  bool operator==(const Copied&) const = default;
};

// The queries at positions first … first + count - 1 of a head. A window's keys begin at a whole register, so that each
// key is in the same lane and in the same partial sum for all queries: results are batch-invariant.
void attend_block(std::uint64_t call, const HeadRows& q, const KeyRows& k, const KeyRows& v, const SequenceGroup& group,
                  const Positions& positions, const float* bias, const DistanceRows& distances, int head_index,
                  int size, int first, int count, float* context, std::ptrdiff_t stride) {
  const Reach reach(positions, first, count, group.keys);
  const int from = reach.begin / kLanes * kLanes, to = reach.end;
  const std::size_t keys = to - from, padded = round_up(to - from), padded_size = size;
  float* const transposed =
      scratch<float, Head>((padded_size + kTileRows) * padded + (kLanes + kTileRows) * padded_size);
  float* const scores = transposed + padded_size * padded;
  float* const rotated_rows = scores + kTileRows * padded;
  float* const queries = rotated_rows + kLanes * padded_size;
  HeadRows values{v(from), v.own.stride};
  const bool copies = keys > kMinCopiedKeys || k.shared;
  float* const copied = copies ? scratch<float, Copied>(padded_size * padded) : nullptr;
  thread_local Copied last;
  if (const Copied wanted{call, k.prefix.first, k.own.first, from, to}; last != wanted) {
    const int found = last.common(wanted, k.shared);
    transpose(k, from + found, int(keys) - found, positions, size, rotated_rows, transposed + found * padded_size);
    if (copies) {
      for (std::size_t key = found; key < keys; ++key) {
        std::copy_n(v(from + int(key)), size, copied + key * padded_size);
      }
    }
    last = wanted;
  }
  if (copies) values = {copied, size};
  const DistanceProducts products =
      distance_products(distances, head_index, k.own, int(keys), size, first, first + count - 1);
  const Head head{positions, bias, size, transposed, values, from, int(keys), distances.row_of ? &products : nullptr};
  const int tiles = (count + kTileRows - 1) / kTileRows;
  for (int tile = 0; tile < tiles; ++tile) {
    const TileRows rows = tile_rows(count, tiles, tile);
    const int query = first + rows.first;
    const int row = query - group.prefix;
    HeadRows q_tile{q(row), q.stride};
    if (positions.cosines) {
      for (int i = 0; i < rows.count; ++i) rotated(q(row + i), query + i, positions, size, queries + i * size);
      q_tile = {queries, size};
    }
    with_constant<kTileRows>(rows.count, [&](auto tile_size) {
      attend_rows<tile_size>(head, q_tile, query, scores, context + row * stride, stride);
    });
  }
}

}  // namespace

void attend(const float* qkv, const SequenceGroup& group, const Positions& positions, int heads, int size,
            float* context, int threads, const DistanceRows& distances) {
  const int kv_heads = positions.kv_heads ? positions.kv_heads : heads, sharing = heads / kv_heads;
  const std::ptrdiff_t hidden = std::ptrdiff_t(heads) * size, kv_columns = std::ptrdiff_t(kv_heads) * size;
  const std::ptrdiff_t stride = hidden + 2 * kv_columns;
  const int task_queries = group.length > kLongTokens && positions.window < 0 ? kLongQueries : kQueries;
  const int min_blocks = (group.length + task_queries - 1) / task_queries;
  if (std::int64_t{group.sequences} * group.length * group.keys * hidden <= kMaxSerial) threads = 1;
  const int blocks = balanced_blocks(min_blocks, 2 * min_blocks, group.sequences * heads, threads);
  static std::atomic<std::uint64_t> calls{0};
  const std::uint64_t call = calls.fetch_add(1, std::memory_order_relaxed) + 1;
  ThreadPool::shared().run(threads, group.sequences * heads * blocks, [&](int task) {
    // The heads of one sequence after those of another; with a prefix, the sequences for one head of its keys.
    const int block = task % blocks, unit = task / blocks;
    const int sequence = group.prefix ? unit / sharing % group.sequences : unit / heads;
    const int head = group.prefix ? unit / sharing / group.sequences * sharing + unit % sharing : unit % heads;
    const std::ptrdiff_t first = group.start + std::ptrdiff_t(sequence) * group.length, column = head * size;
    const float* const q = qkv + first * stride + column;
    const std::ptrdiff_t kv_column = hidden + std::ptrdiff_t(head / sharing) * size;
    const float* const prefix = qkv + group.prefix_start * stride + kv_column;
    const float* const own = qkv + first * stride + kv_column;
    const float* bias = nullptr;
    if (positions.bias) {
      bias = positions.bias + std::ptrdiff_t(head) * (2 * positions.longest - 1) + positions.longest - 1;
    }
    const TileRows queries = tile_rows(group.length, blocks, block);
    const KeyRows k{{prefix, stride}, {own, stride}, group.prefix};
    const KeyRows v{{prefix + kv_columns, stride}, {own + kv_columns, stride}, group.prefix};
    attend_block(call, {q, stride}, k, v, group, positions, bias, distances, head, size, group.prefix + queries.first,
                 queries.count, context + first * hidden + column, hidden);
  });
}

}  // namespace embert::cpu::EMBERT_ISA
