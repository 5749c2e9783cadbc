// Whether a device, and this build's code for it, can run the encoder at all. Asked once, before any weight is loaded.
#pragma once

#include <string>

#include "../kernels/kernels.h"
#include "../status.h"

namespace embert {

constexpr int kLeastMajor = 8;  // compute capability 8.0, Ampere: asynchronous copies, BF16

// Refused below kLeastMajor.
Status check_capability(const std::string& name, int major, int minor);

// `ran`: what became of the kernel that told `build`. Refused where this build has no code that the device can run.
Status check_build(int major, int minor, const Status& ran, const Build& build);

// The refusal of a build for plain 90, whose kernels of Hopper's own instructions are empty but for a trap.
Status without_hopper(const Build& build);

}  // namespace embert
