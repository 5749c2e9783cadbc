// Prints what attention with a window reads. "steps" and cases (length, before, after, first query, queries, keys): a
// line of "first_step end_step", then of each step whether all queries see all its keys, then an empty line. "keys" and
// cases (length, first query, before, after): for each of a warp's 16 queries on Hopper (attention/sm90/tile.cuh) a
// line of the keys that it sees, then an empty line. Queries may be past the keys of a text of this length.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "attention/window.h"

namespace {

void print_steps(int length, int before, int after, int query, int queries, int keys) {
  const embert::KeyWindow window{before, after};
  const int end = window.end_step(query + queries - 1, length, keys), first = window.first_step(query, end, keys);
  std::printf("%d %d\n", first, end);
  for (int step = first; step < end; ++step) std::printf("%d ", window.sees_all(query, queries, step * keys, keys));
  std::printf("\n");
}

void print_keys(int length, int query, int before, int after) {
  constexpr int kStep = 64;
  const embert::KeyWindow window{before, after};
  const int tile = query / kStep * kStep;  // of which the warp is a part
  for (int row = query; row < query + 16; ++row) {
    const int end = window.end_step(tile + kStep - 1, length, kStep);
    for (int step = window.first_step(tile, end, kStep); step < end; ++step) {
      const int from = step * kStep, keys = length - from <= kStep / 2 ? kStep / 2 : kStep;
      const bool all = from + keys <= length && window.sees_all(query, 16, from, keys);
      for (int key = from; key < from + keys; ++key) {
        if (all || unsigned(window.place(row, key)) < unsigned(window.count(row, length))) std::printf("%d ", key);
      }
    }
    std::printf("\n");
  }
  std::printf("\n");
}

}  // namespace

int main(int count, char** arguments) {
  const bool steps = std::strcmp(arguments[1], "steps") == 0;
  for (int i = 2; i < count; i += steps ? 6 : 4) {
    const auto number = [&](int k) { return std::atoi(arguments[i + k]); };
    if (steps)
      print_steps(number(0), number(1), number(2), number(3), number(4), number(5));
    else
      print_keys(number(0), number(1), number(2), number(3));
  }
  return 0;
}
