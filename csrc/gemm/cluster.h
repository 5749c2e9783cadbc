// Blocks of the kernels for many rows come in clusters of two, which lie below each other in y. Each has rows of its
// own, and they share the tile of W: each fetches a half for both (multicast). docs/experiments.md has larger clusters
// and blocks side by side.
#pragma once

namespace embert::hopper {

constexpr int kCluster = 2;

}  // namespace embert::hopper
