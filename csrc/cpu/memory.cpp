#include "cpu/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "cpu/kernels.h"

namespace embert::cpu {
namespace {

// Large blocks ask for huge pages, where the kernel gives them on request: a forward of a short text reads each weight
// once, and with pages of 4 KB an eighth of its time goes to page tables. Less than half a page is left to small ones.
void* allocate(std::size_t bytes) {
  constexpr std::size_t kLine = 64, kHugePage = 1 << 21;
  const std::size_t huge_bytes = (bytes + kHugePage / 2) / kHugePage * kHugePage;
  const std::size_t alignment = huge_bytes > 0 ? kHugePage : kLine, least_bytes = std::max(bytes, huge_bytes);
  void* const memory = std::aligned_alloc(alignment, (least_bytes + alignment - 1) / alignment * alignment);
  if (!memory) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  if (huge_bytes > 0) madvise(memory, huge_bytes, MADV_HUGEPAGE);  // without them it is only slower
#endif
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
