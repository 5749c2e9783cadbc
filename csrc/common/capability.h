// Checks that a device, and this build's code for it, can run the encoder: once, before any weight is loaded.
#pragma once

#include <string>

#include "common/launch.h"
#include "common/status.h"

namespace embert {

constexpr int kMinMajor = 8;  // compute capability 8.0, Ampere: asynchronous copies, BF16

// Returns an error below kMinMajor.
Status check_capability(const std::string& name, int major, int minor);

// The machine code of this build that the device runs.
struct Build {
  int architecture = 0;  // what it was compiled for: 800, 900, …
  bool hopper = false;   // with Hopper's own instructions (90a)
};
Status read_build(Build& build, const Stream& stream);

// Returns an error if this build has no code that the device can run. `ran`: the result of read_build.
Status check_build(int major, int minor, const Status& ran, const Build& build);

// The error of a build for plain 90, in which every kernel that needs Hopper's own instructions is a trap.
Status missing_sm90a(const Build& build);

}  // namespace embert
