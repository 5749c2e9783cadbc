// Blocks of the kernels for many rows run in clusters of two, one below the other in y. Each has its own rows, and they
// share the tile of W: each loads half of it for both (multicast). docs/experiments.md has measurements of larger
// clusters and of blocks side by side.
#pragma once

namespace embert::sm90 {

constexpr int kCluster = 2;

}  // namespace embert::sm90
