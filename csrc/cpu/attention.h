// Attention on packed sequences, on a CPU with AVX-512.
#pragma once

#include <cstdint>

namespace embert::cpu {

// Consecutive sequences of equal length.
struct SequenceGroup {
  int start;  // the first token
  int sequences;
  int length;  // tokens of each
  int keys;    // only the first tokens are attended to, this many
};

// How a layer encodes positions, and its window.
struct Positions {
  const float* cosines = nullptr;  // [length, rotary_dim]: RoPE pairs columns i and i + rotary_dim
  const float* sines = nullptr;    // likewise; null: no RoPE
  int rotary_dim = 0;
  const float* bias = nullptr;  // [heads, 2 · longest - 1]: of key j and query i at j - i + longest - 1; null: none
  int longest = 0;
  int window = -1;  // a query attends to keys that are at most this many tokens away; -1: all
};

// Disentangled attention (DeBERTa): scores also have q·K[r] and Q[r]·k of the row r for the distance, added as they
// are.
struct DistanceRows {
  // K and Q of each head, transposed: [heads, size, columns]; null: the part is absent.
  const float* keys = nullptr;
  const float* queries = nullptr;
  int columns = 0;                       // rows of the table, rounded up to whole registers
  const std::int32_t* row_of = nullptr;  // [2 · longest - 1], by key - query + longest - 1; never grows
  int longest = 0;
};

// qkv [T, 3 · heads · size] → context [T, heads · size] for the tokens of a group. Queries are scaled already; `size`
// is a multiple of 16. A query that attends to no key gets zeros.
void attend(const float* qkv, const SequenceGroup& group, const Positions& positions, int heads, int size,
            float* context, int threads, const DistanceRows& distances = {});

}  // namespace embert::cpu
