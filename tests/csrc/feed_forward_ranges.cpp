// Prints what each cluster is to do: for every case (tiles, chunks, clusters) of the arguments, lines of
// "cluster tile from to" in the clusters' order, then an empty one.
#include <cstdio>
#include <cstdlib>

#include "gemm/kernels/feed_forward_range.h"

int main(int count, char** arguments) {
  for (int at = 1; at + 2 < count; at += 3) {
    const int tiles = std::atoi(arguments[at]), chunks = std::atoi(arguments[at + 1]);
    const int clusters = std::atoi(arguments[at + 2]);
    for (int cluster = 0; cluster < clusters; ++cluster) {
      const auto range = embert::FeedForwardRange::of(tiles, chunks, cluster, clusters);
      for (int i = 0; i < range.runs(); ++i) {
        const auto run = range.run(i);
        std::printf("%d %d %d %d\n", cluster, run.tile, run.from, run.to);
      }
    }
    std::printf("\n");
  }
  return 0;
}
