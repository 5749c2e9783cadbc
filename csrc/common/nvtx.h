// Named ranges for Nsight Systems: EMBERT_NVTX_RANGE("name") lasts until the end of its scope. A build without
// -DEMBERT_NVTX=ON contains nothing of it. A CUDA graph is captured once, so its replays show no ranges: profile with
// graphs off.
#pragma once

#if defined(EMBERT_NVTX)
#include <nvtx3/nvToolsExt.h>

namespace embert {

struct NvtxRange {
  explicit NvtxRange(const char* name) { nvtxRangePushA(name); }
  ~NvtxRange() { nvtxRangePop(); }
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;
};

}  // namespace embert

#define EMBERT_NVTX_RANGE(name) const ::embert::NvtxRange nvtx_range(name)
#else
#define EMBERT_NVTX_RANGE(name) static_cast<void>(0)
#endif
