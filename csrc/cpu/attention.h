// Attention on packed sequences, on a CPU with AVX-512.
#pragma once

namespace embert::cpu {

// Neighbours among sequences, which are of equal length.
struct Group {
  int start;  // the first token
  int sequences;
  int length;  // tokens of each
  int keys;    // its first tokens are attended to, so many of them
};

// How a layer knows positions, and how far it sees.
struct Positions {
  const float* cosines = nullptr;  // [length, turned]: column i < turned of queries and keys is turned with i + turned
  const float* sines = nullptr;    // likewise; null: none is
  int rotary_dim = 0;
  const float* bias = nullptr;  // [heads, 2 · longest - 1]: of key j and query i at j - i + longest - 1; null: none
  int longest = 0;
  int window = -1;  // a query sees keys that are at most so many tokens away; -1: all
};

// qkv [T, 3 · heads · size] → context [T, heads · size] for the tokens of a group. Queries are scaled already; `size`
// is a multiple of 16. A query that sees no key gets zeros.
void attend(const float* qkv, const Group& group, const Positions& positions, int heads, int size, float* context,
            int threads);

}  // namespace embert::cpu
