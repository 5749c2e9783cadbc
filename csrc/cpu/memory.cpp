#include "cpu/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "cpu/kernels.h"

namespace embert::cpu {
namespace {

constexpr std::size_t kLine = 64, kHugePage = 1 << 21;
constexpr std::size_t kPage = 1 << 16;  // the largest usual page

// Large blocks are mappings that ask for huge pages, where the kernel gives them on request: a forward of a short text
// reads each weight once, and pages of 4 KB cost it 5 to 20 % of its time on a virtual machine. In the heap their
// alignment would leave gaps. Returns the size of a block's mapping; 0: it is in the heap.
std::size_t mapped_bytes(std::size_t bytes) {
  if (bytes < kHugePage / 2) return 0;
  const std::size_t huge_pages = (bytes + kHugePage / 2) / kHugePage;
  return std::max(huge_pages * kHugePage, (bytes + kPage - 1) / kPage * kPage);
}

void* map(std::size_t bytes) {
  void* const first = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (first == MAP_FAILED) throw std::bad_alloc();
  char* const start = static_cast<char*>(first);
  const std::size_t before = -reinterpret_cast<std::uintptr_t>(start) % kHugePage;
  if (before > 0) munmap(start, before);
  munmap(start + before + bytes, kHugePage - before);
  madvise(start + before, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);  // without them it is only slower
  return start + before;
}

void* allocate(std::size_t bytes) {
  if (const std::size_t mapped = mapped_bytes(bytes)) return map(mapped);
  void* const memory = std::aligned_alloc(kLine, (bytes + kLine - 1) / kLine * kLine);
  if (!memory) throw std::bad_alloc();
  return memory;
}

void release(void* memory, std::size_t bytes) {
  if (const std::size_t mapped = mapped_bytes(bytes)) {
    munmap(memory, mapped);
  } else {
    std::free(memory);
  }
}

}  // namespace

Memory::Memory(std::size_t bytes) : first_(allocate(bytes)), bytes_(bytes) {
  std::memset(first_, 0, bytes);
}

Memory::~Memory() {
  release(first_, bytes_);
}

void* Memory::at_least(std::size_t bytes) {
  if (bytes > bytes_) {
    void* const larger = allocate(bytes);
    if (bytes_ > 0) std::memcpy(larger, first_, bytes_);
    release(first_, bytes_);
    first_ = larger;
    bytes_ = bytes;
  }
  return first_;
}

LinearLayer::~LinearLayer() = default;

}  // namespace embert::cpu
