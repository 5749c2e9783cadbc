// Prints what attention with a window reads: for every case (length, window, first query, queries, keys) of the
// arguments a line of "first_step end_step", then of each step whether all queries see all its keys, then an empty one.
#include <cstdio>
#include <cstdlib>

#include "attention/window.h"

int main(int count, char** arguments) {
  for (int at = 1; at + 4 < count; at += 5) {
    int of[5];
    for (int i = 0; i < 5; ++i) of[i] = std::atoi(arguments[at + i]);
    const auto [length, size, query, queries, keys] = of;
    const embert::KeyWindow window{size};
    const int first = window.first_step(query, keys), end = window.end_step(query + queries - 1, length, keys);
    std::printf("%d %d\n", first, end);
    for (int step = first; step < end; ++step) std::printf("%d ", window.sees_all(query, queries, step * keys, keys));
    std::printf("\n");
  }
  return 0;
}
