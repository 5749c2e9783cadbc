// Memory that a thread keeps between calls of a kernel.
#pragma once

#include <cstddef>
#include <vector>

namespace embert::cpu {

// At least `count` elements with what the last call of this kernel left in them. `Kernel` is any type of its own.
template <typename T, typename Kernel>
T* room(std::size_t count) {
  thread_local std::vector<T> kept;
  if (kept.size() < count) kept.resize(count);
  return kept.data();
}

}  // namespace embert::cpu
