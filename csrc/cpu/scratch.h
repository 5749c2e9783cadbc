// Scratch memory that a thread keeps between calls of a kernel.
#pragma once

#include <cstddef>
#include <vector>

namespace embert::cpu {

// At least `count` elements, with the contents from the last call of this kernel. `Kernel` is any unique type.
template <typename T, typename Kernel>
T* scratch(std::size_t count) {
  thread_local std::vector<T> memory;
  if (memory.size() < count) memory.resize(count);
  return memory.data();
}

}  // namespace embert::cpu
