// Gathers the rows that pooling by cls or by the last token reads, one a sequence. After the last attention no other
// row is needed, so later ops run on B rows instead of T.
//
// A warp copies a sequence's row of context and of x. The launch is the cost.

#include "common/dependent_launch.cuh"
#include "common/numeric.cuh"
#include "heads/pooling.h"

namespace embert {
namespace {

constexpr int kWarps = 4;

template <typename T>
__global__ void __launch_bounds__(kWarps * 32)
    gather_kernel(const T* context, const RowView x, const int* cu_seqlens, bool last, int sequences, int hidden,
                  T* context_to, T* x_to, float2* sums_to) {
  const int lane = threadIdx.x % 32, sequence = blockIdx.x * kWarps + threadIdx.x / 32;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (sequence >= sequences) return;
  const int first = cu_seqlens[sequence], end = cu_seqlens[sequence + 1];
  if (first == end) return;  // past the batch's last sequence
  const size_t row = last ? end - 1 : first;
  const auto copy = [&](const T* from, T* to) {
    for (int column = lane * Pack<T>::kSize; column < hidden; column += 32 * Pack<T>::kSize)
      store_pack(to + size_t(sequence) * hidden + column, load_pack_coherent(from + row * hidden + column));
  };
  copy(context, context_to);
  copy(static_cast<const T*>(x.data), x_to);
  if (x.stats == nullptr) return;
  const int sums = (hidden + kStatColumns - 1) / kStatColumns * x.splits;
  for (int i = lane; i < sums; i += 32) sums_to[size_t(sequence) * sums + i] = x.stats[row * sums + i];
}

template <typename T>
Status launch_gather(const void* context, const RowView& x, const int* cu_seqlens, bool last, int sequences, int hidden,
                     void* context_to, void* x_to, float2* sums_to, const Stream& stream) {
  return launch("gather", gather_kernel<T>, (sequences + kWarps - 1) / kWarps, kWarps * 32, 0, stream,
                static_cast<const T*>(context), x, cu_seqlens, last, sequences, hidden, static_cast<T*>(context_to),
                static_cast<T*>(x_to), sums_to);
}

}  // namespace

Status gather(DType dtype, const void* context, const RowView& x, const int* cu_seqlens, Pooling pooling, int sequences,
              int hidden, void* context_to, void* x_to, float2* sums_to, const Stream& stream) {
  if (pooling != Pooling::kCls && pooling != Pooling::kLast)
    return Status::refused("gather: this pooling reads every row");
  const bool last = pooling == Pooling::kLast;
  switch (dtype) {
    case DType::kFloat16:
      return launch_gather<half_t>(context, x, cu_seqlens, last, sequences, hidden, context_to, x_to, sums_to, stream);
    case DType::kBFloat16:
      return launch_gather<bfloat_t>(context, x, cu_seqlens, last, sequences, hidden, context_to, x_to, sums_to,
                                     stream);
    default:
      return launch_gather<float>(context, x, cu_seqlens, last, sequences, hidden, context_to, x_to, sums_to, stream);
  }
}

}  // namespace embert
