// Prints what a warp's 16 queries see within a window on Hopper (attention/sm90/tile.cuh): for every case (length,
// first query, window) of the arguments a line of keys for each query, then an empty line.
#include <cstdio>
#include <cstdlib>

#include "attention/window.h"

int main(int count, char** arguments) {
  constexpr int kStep = 64;
  for (int at = 1; at + 2 < count; at += 3) {
    const int length = std::atoi(arguments[at]), query = std::atoi(arguments[at + 1]);
    const embert::KeyWindow window{std::atoi(arguments[at + 2])};
    const int tile = query / kStep * kStep;  // of which the warp is a part
    for (int row = query; row < query + 16 && row < length; ++row) {
      for (int step = window.first_step(tile, kStep); step < window.end_step(tile + kStep - 1, length, kStep); ++step) {
        const int from = step * kStep, keys = length - from <= kStep / 2 ? kStep / 2 : kStep;
        const bool all = from + keys <= length && window.sees_all(query, 16, from, keys);
        for (int key = from; key < from + keys; ++key) {
          if (all || unsigned(window.place(row, key)) <= unsigned(window.most(row, length))) std::printf("%d ", key);
        }
      }
      std::printf("\n");
    }
    std::printf("\n");
  }
  return 0;
}
