// Maxima over texts on any device: GEMMs of some rows into memory, then a kernel that reduces them.
//
// Floor for 26 692 rows of 30 522 columns, FP16: 1.6 GB written and read. Our Hopper kernel has neither.

#include <algorithm>

#include "common/launch.cuh"
#include "common/memory.h"
#include "common/numeric.cuh"
#include "gemm/gemm.h"

namespace embert {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = 32;                           // rows of a block, over which a thread iterates
constexpr size_t kProductBytes = size_t(64) << 20;  // of products in memory at a time

// A thread has the columns of a pack. It keeps their maxima until the text changes. Positive floats have the order of
// their bits, and all negative ones count as 0, the initial value of the maxima.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    raise_maxima_kernel(const T* products, int columns, int pitch, const int* text_of, int rows, int first_text,
                        float* maxima) {
  constexpr int kWidth = Pack<T>::kSize;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const int column = (blockIdx.x * kThreads + threadIdx.x) * kWidth;
  if (column >= columns) return;
  const int first = blockIdx.y * kRows, end = min(rows, first + kRows);
  int largest[kWidth] = {};
  int text = kNoText;
  const auto leave = [&] {
    int* const to = reinterpret_cast<int*>(maxima) + size_t(text - first_text) * pitch + column;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (text != kNoText && column + i < columns && largest[i] > 0) atomicMax(to + i, largest[i]);
      largest[i] = 0;
    }
  };
#pragma unroll 4
  for (int row = first; row < end; ++row) {
    const int row_text = text_of[row];
    const Pack<T> pack = load_pack_coherent(products + size_t(row) * pitch + column);
    if (row_text != text) {
      leave();
      text = row_text;
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) largest[i] = max(largest[i], __float_as_int(to_float(pack.values[i])));
  }
  leave();
}

class PortableMaxima final : public TextMaxima {
 public:
  PortableMaxima(DType dtype, int out, int in) : dtype_(dtype), out_(out), in_(in) {}

  Status init(GemmProvider& gemm, LinearWeights weights, const Stream& stream) {
    const size_t row = size_t(maxima_pitch(out_)) * bytes_of(dtype_);
    rows_at_once_ = int(std::clamp<size_t>(kProductBytes / row, 1, kMaxRows));
    EMBERT_TRY(gemms_.allocate(rows_at_once_ * row));
    weights.pitch = maxima_pitch(out_);
    return gemm.prepare(weights, stream, linear_);
  }

  Status run(const TextRows& texts, float* maxima, const Stream& stream) override {
    int none = 0;
    for (int done = 0; done < texts.rows; done += rows_at_once_) {
      const int rows = std::min(rows_at_once_, texts.rows - done), row = texts.first_row + done;
      const void* const x = static_cast<const uint8_t*>(texts.x) + size_t(row) * in_ * bytes_of(dtype_);
      EMBERT_TRY(linear_->run({x}, {}, rows, gemms_.as(), nullptr, none, stream));
      EMBERT_TRY(raise(texts.text_of + row, rows, texts.first_text, maxima, stream));
    }
    return {};
  }

  size_t workspace_bytes() const override { return gemms_.bytes(); }

 private:
  static constexpr int kMaxRows = 16384;

  Status raise(const int* text_of, int rows, int first_text, float* maxima, const Stream& stream) const {
    return with_dtype(dtype_, [&](auto type) {
      using T = decltype(type);
      const int across = kThreads * Pack<T>::kSize;
      const dim3 grid((out_ + across - 1) / across, (rows + kRows - 1) / kRows);
      return launch("raise_maxima", raise_maxima_kernel<T>, grid, kThreads, 0, stream, gemms_.as<const T>(), out_,
                    maxima_pitch(out_), text_of, rows, first_text, maxima);
    });
  }

  DType dtype_;
  int out_, in_;
  int rows_at_once_ = 0;
  DeviceBuffer gemms_;
  std::unique_ptr<Linear> linear_;
};

}  // namespace

Status make_portable_maxima(GemmProvider& gemm, DType dtype, const LinearWeights& weights, const Stream& stream,
                            std::unique_ptr<TextMaxima>& maxima_gemm) {
  auto portable = std::make_unique<PortableMaxima>(dtype, weights.n, weights.k);
  EMBERT_TRY(portable->init(gemm, weights, stream));
  maxima_gemm = std::move(portable);
  return {};
}

}  // namespace embert
