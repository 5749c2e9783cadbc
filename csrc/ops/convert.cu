// y = x between storage types: for weights at load, and for token vectors in answers.

#include <algorithm>

#include "common/dependent_launch.cuh"
#include "common/numeric.cuh"
#include "ops/elementwise.h"

namespace embert {
namespace {

constexpr int kThreads = 256;

template <typename From, typename To>
__global__ void __launch_bounds__(kThreads) convert_kernel(const From* x, To* y, size_t count) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  for (size_t i = blockIdx.x * size_t(kThreads) + threadIdx.x; i < count; i += size_t(gridDim.x) * kThreads) {
    y[i] = from_float<To>(to_float(x[i]));
  }
}

template <typename From>
Status convert_from(const void* x, DType to, void* y, size_t count, const Stream& stream) {
  const int blocks = int(std::min<size_t>((count + kThreads - 1) / kThreads, 132 * 32));
  const From* source = static_cast<const From*>(x);
  switch (to) {
    case DType::kFloat16:
      return launch("convert", convert_kernel<From, half_t>, blocks, kThreads, 0, stream, source,
                    static_cast<half_t*>(y), count);
    case DType::kBFloat16:
      return launch("convert", convert_kernel<From, bfloat_t>, blocks, kThreads, 0, stream, source,
                    static_cast<bfloat_t*>(y), count);
    default:
      return launch("convert", convert_kernel<From, float>, blocks, kThreads, 0, stream, source, static_cast<float*>(y),
                    count);
  }
}

}  // namespace

Status convert(DType from, const void* x, DType to, void* y, size_t count, const Stream& stream) {
  switch (from) {
    case DType::kFloat16:
      return convert_from<half_t>(x, to, y, count, stream);
    case DType::kBFloat16:
      return convert_from<bfloat_t>(x, to, y, count, stream);
    default:
      return convert_from<float>(x, to, y, count, stream);
  }
}

}  // namespace embert
