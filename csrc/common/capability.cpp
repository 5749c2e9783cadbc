#include "common/capability.h"

namespace embert {
namespace {

std::string version(int major, int minor) {
  return std::to_string(major) + "." + std::to_string(minor);
}

}  // namespace

Status check_capability(const std::string& name, int major, int minor) {
  if (major >= kMinMajor) return {};
  return Status::refused(name, " has compute capability ", version(major, minor), "; the CUDA encoder needs ",
                         version(kMinMajor, 0), " or newer");
}

Status check_build(int major, int minor, const Status& ran, const Build& build) {
  if (ran.is_lost()) return ran;
  if (ran.ok() && build.architecture >= kMinMajor * 100) return {};
  return Status::refused("this build has no code for compute capability ", version(major, minor),
                         (ran.ok() ? std::string() : " (" + ran.message() + ")"),
                         "; install it again on this machine, or with EMBERT_CUDA_ARCHITECTURES");
}

Status missing_sm90a(const Build& build) {
  return Status::refused("this build has no code with Hopper's own instructions: it was compiled for ",
                         build.architecture / 10,
                         ", not 90a; build it again for 90a-real, or ask for the encoder cuda-portable");
}

}  // namespace embert
