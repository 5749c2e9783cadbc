// Maxima over texts in one GEMM (gemm/kernels/maxima.cuh).

#include "gemm/kernels/maxima.cuh"
#include "gemm/kernels/sm90.h"
#include "gemm/kernels/sm90_launch.cuh"

namespace embert::sm90 {
namespace {

class MaximaSm90 final : public TextMaxima {
 public:
  MaximaSm90(GemmSm90& owner, const LinearWeights& weights) : owner_(owner), weights_(weights) {}

  // The bias is 0 past the last column.
  Status init(const Stream& stream) {
    EMBERT_TRY(bias_.allocate(maxima_pitch(weights_.n) * sizeof(float)));
    EMBERT_CUDA(cudaMemsetAsync(bias_.as(), 0, bias_.bytes(), stream.handle));
    EMBERT_CUDA(cudaMemcpyAsync(bias_.as(), weights_.bias, weights_.n * sizeof(float), cudaMemcpyDeviceToDevice,
                                stream.handle));
    return {};
  }

  Status run(const TextRows& texts, float* maxima, const Stream& stream) override {
    if (texts.rows == 0) return {};
    using Shape = PingPongShape;
    const CUtensorMap *x_map = nullptr, *w_map = nullptr;
    EMBERT_TRY(owner_.map({texts.x, texts.all_rows, weights_.k, Shape::kRows, 64}, x_map));
    EMBERT_TRY(owner_.map({weights_.weight, weights_.n, weights_.k, Shape::kWShare, 64}, w_map));
    const int tiles = tiles_of(texts.rows, Shape::kRows * kCluster) * tiles_of(weights_.n, Shape::kColumns);
    const MaximaArguments arguments{bias_.as<float>(),        texts.text_of,   maxima,
                                    maxima_pitch(weights_.n), texts.first_row, texts.first_row + texts.rows,
                                    texts.first_text,         weights_.n,      weights_.k,
                                    maxima_band(weights_.k)};
    return with_half_dtype(owner_.dtype(), [&](auto type) {
      return launch_persistent<Shape>("maxima", owner_, maxima_kernel<decltype(type)>, tiles, stream, *x_map, *w_map,
                                      arguments);
    });
  }

 private:
  GemmSm90& owner_;
  LinearWeights weights_;
  DeviceBuffer bias_;
};

}  // namespace

Status GemmSm90::prepare_maxima(const LinearWeights& weights, const Stream& stream,
                                std::unique_ptr<TextMaxima>& maxima_gemm) {
  if (weights.k % 8 != 0) return Status::refused("hopper maxima: rows must have a multiple of 8 columns");
  auto maxima = std::make_unique<MaximaSm90>(*this, weights);
  EMBERT_TRY(maxima->init(stream));
  maxima_gemm = std::move(maxima);
  return {};
}

}  // namespace embert::sm90
