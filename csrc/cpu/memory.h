// Memory of the kernels: aligned and zeroed for weights, and each thread's scratch memory.
//
// What allocates is compiled once, for any CPU of the architecture: an inline function of the standard library that is
// compiled for two instruction sets would be linked in one of them for both.
#pragma once

#include <cstddef>

namespace embert::cpu {

// Bytes that begin at a cache line. They keep their contents when they grow.
class Memory {
 public:
  Memory() = default;
  explicit Memory(std::size_t bytes);  // zeros. Throws std::bad_alloc.
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // Throws std::bad_alloc.
  void* at_least(std::size_t bytes);

 protected:
  void* first_ = nullptr;
  std::size_t bytes_ = 0;
};

// `count` zeros.
template <typename T>
class Array : Memory {
 public:
  explicit Array(std::size_t count) : Memory(count * sizeof(T)) {}

  T* data() const { return static_cast<T*>(first_); }
  T& operator[](std::size_t index) const { return data()[index]; }
};

// Scratch memory that a thread keeps between calls of a kernel: at least `count` elements, with the contents from the
// last call of this kernel. `Kernel` is any unique type.
template <typename T, typename Kernel>
T* scratch(std::size_t count) {
  thread_local Memory memory;
  return static_cast<T*>(memory.at_least(count * sizeof(T)));
}

}  // namespace embert::cpu
