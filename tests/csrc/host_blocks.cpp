// Takes and frees blocks of results (common/memory.h) as the arguments say: "+N" takes N KiB and prints the number
// of the block, counted by address from 0; "-I" frees the I-th that was taken; "x" lets go of the blocks' own memory.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "common/memory.h"

int main(int count, char** arguments) {
  auto blocks = std::make_shared<embert::HostBlocks>();
  std::vector<embert::HostBlocks::Floats> taken;
  std::vector<float*> addresses;
  for (int i = 1; i < count; ++i) {
    const char what = arguments[i][0];
    const size_t number = std::strtoul(arguments[i] + 1, nullptr, 10);
    if (what == 'x') blocks.reset();
    if (what == '-') taken[number].reset();
    if (what != '+') continue;
    const size_t floats = number * 1024 / sizeof(float);
    taken.push_back(blocks->allocate(floats));
    for (size_t at = 0; at < floats; ++at) taken.back()[at] = float(at);
    const auto found = std::find(addresses.begin(), addresses.end(), taken.back().get());
    std::printf("%d ", int(found - addresses.begin()));
    if (found == addresses.end()) addresses.push_back(taken.back().get());
  }
  return 0;
}
