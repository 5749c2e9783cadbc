// The Hopper provider: tensor maps, tile shapes and launches of the kernel in hopper_kernel.cuh.

#include <cuda.h>

#include <map>
#include <tuple>

#include "gemm.h"
#include "hopper_kernel.cuh"

namespace embert {
namespace {

using hopper::TileShape;

// All tuned numbers. Wide: two row tiles share W, for many rows. The others: more and smaller tiles for fewer rows, and
// a ring deep enough that all of W's tile is on its way before the earlier kernel ends (K = 768: 12 stages).
using Wide = TileShape<128, 128, 2, 5>;
using Middle = TileShape<64, 64, 1, 12>;
using Narrow = TileShape<64, 32, 1, 12>;
using Slim = TileShape<64, 16, 1, 14>;

class Hopper;

class HopperLinear final : public Linear {
 public:
  HopperLinear(Hopper& owner, const LinearWeights& weights) : owner_(owner), weights_(weights) {}
  Status init();
  Status run(const void* x, const void* residual, int rows, void* y, const Stream& stream) override;

 private:
  template <typename T, typename Shape>
  Status run_shape(const CUtensorMap& w_map, const void* x, const void* residual, int rows, void* y,
                   const Stream& stream);
  template <typename T, typename Shape, Activation kActivation, bool kResidual>
  Status run_kernel(const CUtensorMap& w_map, const void* x, const void* residual, int rows, void* y,
                    const Stream& stream);
  template <typename T>
  Status run_type(const void* x, const void* residual, int rows, void* y, const Stream& stream);

  Hopper& owner_;
  LinearWeights weights_;
  CUtensorMap wide_map_{}, middle_map_{}, narrow_map_{}, slim_map_{};
};

class Hopper final : public GemmProvider {
 public:
  explicit Hopper(DType dtype) : dtype_(dtype) {}

  Status open() {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    EMBERT_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
    if (found == nullptr) return Status::refused("the driver has no cuTensorMapEncodeTiled: it is older than CUDA 12");
    encode_ = reinterpret_cast<decltype(encode_)>(found);
    int device = 0;
    EMBERT_CUDA(cudaGetDevice(&device));
    EMBERT_CUDA(cudaDeviceGetAttribute(&processors_, cudaDevAttrMultiProcessorCount, device));
    return {};
  }

  const char* name() const override { return "hopper"; }
  size_t workspace_bytes() const override { return 0; }
  bool dependent_launch() const override { return true; }
  Status prepare(const LinearWeights& weights, std::unique_ptr<Linear>& linear) override {
    if (weights.in % 8 != 0 || weights.out % 8 != 0)
      return Status::refused("hopper gemm: sizes must be multiples of 8");
    auto made = std::make_unique<HopperLinear>(*this, weights);
    EMBERT_TRY(made->init());
    linear = std::move(made);
    return {};
  }

  // A row-major [rows, columns] matrix cut into boxes of [box_rows, 64].
  Status map(const void* matrix, int rows, int columns, int box_rows, CUtensorMap& made) const {
    const cuuint64_t sizes[2] = {cuuint64_t(columns), cuuint64_t(rows)};
    const cuuint64_t pitch[1] = {cuuint64_t(columns) * 2};
    const cuuint32_t box[2] = {64, cuuint32_t(box_rows)};
    const cuuint32_t strides[2] = {1, 1};
    const CUresult code =
        encode_(&made, dtype_ == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                2, const_cast<void*>(matrix), sizes, pitch, box, strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (code == CUDA_SUCCESS) return {};
    return Status::refused("cuTensorMapEncodeTiled of [" + std::to_string(rows) + ", " + std::to_string(columns) +
                           "]: CUresult " + std::to_string(int(code)));
  }

  DType dtype() const { return dtype_; }
  int processors() const { return processors_; }

 private:
  DType dtype_;
  int processors_ = 0;
  decltype(&cuTensorMapEncodeTiled) encode_ = nullptr;
};

Status HopperLinear::init() {
  EMBERT_TRY(owner_.map(weights_.weight, weights_.out, weights_.in, Wide::kColumns / Wide::kCluster, wide_map_));
  EMBERT_TRY(owner_.map(weights_.weight, weights_.out, weights_.in, Middle::kColumns, middle_map_));
  EMBERT_TRY(owner_.map(weights_.weight, weights_.out, weights_.in, Narrow::kColumns, narrow_map_));
  return owner_.map(weights_.weight, weights_.out, weights_.in, Slim::kColumns, slim_map_);
}

template <typename T, typename Shape, Activation kActivation, bool kResidual>
Status HopperLinear::run_kernel(const CUtensorMap& w_map, const void* x, const void* residual, int rows, void* y,
                                const Stream& stream) {
  const auto kernel = hopper::gemm_kernel<T, Shape, kActivation, kResidual>;
  EMBERT_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes));
  CUtensorMap x_map, y_map, residual_map{};
  EMBERT_TRY(owner_.map(x, rows, weights_.in, Shape::kRows, x_map));
  EMBERT_TRY(owner_.map(y, rows, weights_.out, Shape::kRows, y_map));
  if (kResidual) EMBERT_TRY(owner_.map(residual, rows, weights_.out, Shape::kRows, residual_map));

  const int row_tiles = (rows + Shape::kRows * Shape::kCluster - 1) / (Shape::kRows * Shape::kCluster);
  const int tiles = row_tiles * ((weights_.out + Shape::kColumns - 1) / Shape::kColumns);
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {Shape::kCluster, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(std::min(tiles, owner_.processors() / Shape::kCluster) * Shape::kCluster);
  config.blockDim = dim3(hopper::kGemmThreads);
  config.dynamicSmemBytes = Shape::kSharedBytes;
  config.stream = stream.handle;
  config.attrs = attributes;
  config.numAttrs = stream.dependent_launch ? 2 : 1;
  const cudaError_t code =
      cudaLaunchKernelEx(&config, kernel, x_map, w_map, residual_map, y_map, static_cast<const T*>(weights_.bias),
                         static_cast<const T*>(residual), static_cast<T*>(y), rows, weights_.out, weights_.in);
  if (code == cudaSuccess) return {};
  return Status::cuda(code, ("hopper gemm (" + std::to_string(rows) + " rows, " + std::to_string(weights_.in) + " to " +
                             std::to_string(weights_.out) + ")")
                                .c_str());
}

template <typename T, typename Shape>
Status HopperLinear::run_shape(const CUtensorMap& w_map, const void* x, const void* residual, int rows, void* y,
                               const Stream& stream) {
  if (residual != nullptr) {
    if (weights_.activation != Activation::kNone) return Status::refused("hopper gemm: a residual and an activation");
    return run_kernel<T, Shape, Activation::kNone, true>(w_map, x, residual, rows, y, stream);
  }
  switch (weights_.activation) {
    case Activation::kGeluErf:
      return run_kernel<T, Shape, Activation::kGeluErf, false>(w_map, x, nullptr, rows, y, stream);
    case Activation::kGeluTanh:
      return run_kernel<T, Shape, Activation::kGeluTanh, false>(w_map, x, nullptr, rows, y, stream);
    case Activation::kRelu:
      return run_kernel<T, Shape, Activation::kRelu, false>(w_map, x, nullptr, rows, y, stream);
    default:
      return run_kernel<T, Shape, Activation::kNone, false>(w_map, x, nullptr, rows, y, stream);
  }
}

template <typename T>
Status HopperLinear::run_type(const void* x, const void* residual, int rows, void* y, const Stream& stream) {
  // The smallest tiles that still find a multiprocessor each; tile shapes change no bits, so any rule is right.
  const auto tiles = [&](int tile_rows, int tile_columns) {
    return (rows + tile_rows - 1) / tile_rows * ((weights_.out + tile_columns - 1) / tile_columns);
  };
  const int processors = owner_.processors();
  if (tiles(Slim::kRows, Slim::kColumns) <= processors)
    return run_shape<T, Slim>(slim_map_, x, residual, rows, y, stream);
  if (tiles(Narrow::kRows, Narrow::kColumns) <= processors) {
    return run_shape<T, Narrow>(narrow_map_, x, residual, rows, y, stream);
  }
  if (tiles(Middle::kRows, Middle::kColumns) <= 2 * processors) {
    return run_shape<T, Middle>(middle_map_, x, residual, rows, y, stream);
  }
  return run_shape<T, Wide>(wide_map_, x, residual, rows, y, stream);
}

Status HopperLinear::run(const void* x, const void* residual, int rows, void* y, const Stream& stream) {
  if (rows == 0) return {};
  return owner_.dtype() == DType::kFloat16 ? run_type<half_t>(x, residual, rows, y, stream)
                                           : run_type<bfloat_t>(x, residual, rows, y, stream);
}

}  // namespace

Status make_hopper(DType dtype, std::unique_ptr<GemmProvider>& provider) {
  if (dtype == DType::kFloat32) return Status::refused("hopper gemm: 16-bit types only");
  auto made = std::make_unique<Hopper>(dtype);
  EMBERT_TRY(made->open());
  provider = std::move(made);
  return {};
}

}  // namespace embert
