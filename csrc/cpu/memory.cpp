#include "cpu/memory.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "cpu/kernels.h"

namespace embert::cpu {
namespace {

void* allocate(std::size_t bytes) {
  constexpr std::size_t kLine = 64;
  void* const memory = std::aligned_alloc(kLine, (bytes + kLine - 1) / kLine * kLine);
  if (!memory) throw std::bad_alloc();
  return memory;
}

}  // namespace

Memory::Memory(std::size_t bytes) : first_(allocate(bytes)), bytes_(bytes) {
  std::memset(first_, 0, bytes);
}

Memory::~Memory() {
  std::free(first_);
}

void* Memory::at_least(std::size_t bytes) {
  if (bytes > bytes_) {
    void* const larger = allocate(bytes);
    if (bytes_ > 0) std::memcpy(larger, first_, bytes_);
    std::free(first_);
    first_ = larger;
    bytes_ = bytes;
  }
  return first_;
}

LinearLayer::~LinearLayer() = default;

}  // namespace embert::cpu
