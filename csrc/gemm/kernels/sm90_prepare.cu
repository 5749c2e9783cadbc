// Preparation while a model is loaded: creates our GEMMs and folds LayerNorms into them.

#include "gemm/epilogue/fold.cuh"
#include "gemm/gemm.h"
#include "gemm/kernels/gated.cuh"
#include "gemm/kernels/sm90.h"
#include "gemm/kernels/sm90_checks.h"
#include "ops/activation.cuh"

namespace embert {
namespace sm90 {
namespace {

// LayerNorms are not folded where that error exceeds this multiple of a model's own rounding of γ·W (2.1e-4 in FP16,
// 1.7e-3 in BF16).
constexpr float kFoldTolerance = 3.0f;

// The constants of a gated GEMM. fold.cuh has multiplied all by kGateFactor; this undoes it for the values. `width`:
// floats for each row of W; the last one counts, because {Σ γ·W, …} has no factor.
__global__ void __launch_bounds__(kFoldThreads) free_values_kernel(float* columns, int out, int width) {
  griddepcontrol_wait();
  const int n = blockIdx.x * kFoldThreads + threadIdx.x;
  if (n < out) columns[(2 * n + 2) * width - 1] *= 1.0f / kGateFactor;
}

}  // namespace

Status GemmSm90::open() {
  EMBERT_TRY(maps_.open());
  int device = 0;
  EMBERT_CUDA(cudaGetDevice(&device));
  EMBERT_CUDA(cudaDeviceGetAttribute(&num_sms_, cudaDevAttrMultiProcessorCount, device));
  EMBERT_TRY(fold_error_.allocate(sizeof(float)));
  return fold_error_.zero();
}

Status GemmSm90::check_folds() const {
  float worst = 0.0f;
  EMBERT_CUDA(cudaMemcpy(&worst, fold_error_.as(), sizeof(worst), cudaMemcpyDeviceToHost));
  const float rounding = dtype_ == DType::kFloat16 ? 2.1e-4f : 1.7e-3f;
  if (worst <= kFoldTolerance * rounding) return {};
  return Status::refused("LayerNorm's gamma cannot be folded into the products: its relative error would be ", worst,
                         ", at most ", kFoldTolerance * rounding, " is taken");
}

Status GemmSm90::prepare(const LinearWeights& weights, const Stream& stream, std::unique_ptr<Linear>& linear) {
  if (weights.scales != nullptr) return prepare_int8(weights, stream, linear);
  EMBERT_TRY(check_weights(weights));
  auto gemm = std::make_unique<LinearSm90>(*this, weights);
  EMBERT_TRY(gemm->init(stream));
  linear = std::move(gemm);
  return {};
}

template <typename T>
Status LinearSm90::fold(const Stream& stream) {
  T* const weight = static_cast<T*>(weights_.weight);
  const bool is_pair = weights_.prescaled_rows && weights_.input_norm.gamma != nullptr && !weights_.rms;
  const Norm folded = weights_.prescaled_rows ? Norm{} : weights_.input_norm;
  const float factor = weights_.gated ? kGateFactor : activation_factor(weights_.activation);
  if (is_pair) {
    EMBERT_TRY(launch("sum_input", sum_input_kernel<T>, w_rows_, kFoldThreads, 0, stream, weight, weights_.bias,
                      weights_.input_norm, weights_.k, factor, static_cast<float2*>(plain_columns()),
                      owner_.fold_error()));
  } else {
    EMBERT_TRY(launch("fold_input", fold_input_kernel<T>, w_rows_, kFoldThreads, 0, stream, weight, weights_.exact,
                      weights_.bias, folded, weights_.rms, weights_.k, factor, static_cast<float*>(plain_columns()),
                      owner_.fold_error()));
  }
  const int blocks = (weights_.n + kFoldThreads - 1) / kFoldThreads;
  if (weights_.gated)
    return launch("free_values", free_values_kernel, blocks, kFoldThreads, 0, stream,
                  static_cast<float*>(plain_columns()), weights_.n, is_pair ? 2 : 1);
  return launch("fold_residual", fold_residual_kernel<T>, blocks, kFoldThreads, 0, stream, weights_.bias,
                weights_.residual_norm, weights_.rms, weights_.next_gamma, weights_.n, residual_columns(),
                static_cast<T*>(next_gamma()));
}

Status LinearSm90::init(const Stream& stream) {
  padded_ = (w_rows_ + kColumnPadding - 1) / kColumnPadding * kColumnPadding;
  EMBERT_TRY(columns_.allocate(size_t(padded_) * (2 * sizeof(float2) + sizeof(half_t))));
  EMBERT_CUDA(cudaMemsetAsync(columns_.as(), 0, columns_.bytes(), stream.handle));
  EMBERT_TRY(owner_.dtype() == DType::kFloat16 ? fold<half_t>(stream) : fold<bfloat_t>(stream));
  weights_.exact = nullptr;  // freed after this
  weights_.rope = nullptr;
  return {};
}

}  // namespace sm90

Status make_sm90(DType dtype, std::unique_ptr<GemmProvider>& provider) {
  if (dtype == DType::kFloat32) return Status::refused("hopper gemm: 16-bit types only");
  auto gemm = std::make_unique<sm90::GemmSm90>(dtype);
  EMBERT_TRY(gemm->open());
  provider = std::move(gemm);
  return {};
}

}  // namespace embert
