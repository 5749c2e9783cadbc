// The portable GEMM: cuBLASLt, with a plan for each shape bucket and one workspace.
//
// The library is opened at run time. So an encoder with our own kernels never loads its 500 MB, and a build needs only
// its header. Without the header (EMBERT_HAS_CUBLASLT unset) this provider returns an error that says so.

#include "gemm/gemm.h"

#ifdef EMBERT_HAS_CUBLASLT

#include <cublasLt.h>
#include <dlfcn.h>

#include <map>
#include <utility>

#include "common/memory.h"
#include "ops/elementwise.h"

namespace embert {
namespace {

struct Library {
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtDestroy) destroy = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulDescCreate) desc_create = nullptr;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) layout_create = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  decltype(&cublasLtMatmulAlgoCheck) algo_check = nullptr;
};

// Owns a handle of the library.
template <typename Handle>
class UniqueHandle {
 public:
  using Destroy = cublasStatus_t (*)(Handle);
  explicit UniqueHandle(Destroy destroy) : destroy_(destroy) {}
  UniqueHandle(UniqueHandle&& other) noexcept
      : destroy_(other.destroy_), handle_(std::exchange(other.handle_, nullptr)) {}
  ~UniqueHandle() {
    if (handle_ != nullptr) destroy_(handle_);
  }
  Handle* place() { return &handle_; }
  Handle get() const { return handle_; }

 private:
  Destroy destroy_;
  Handle handle_ = nullptr;
};
using Layout = UniqueHandle<cublasLtMatrixLayout_t>;

Status open_library(const std::string& path, Library& library) {
  const std::string fallback = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
  void* handle = path.empty() ? nullptr : dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) handle = dlopen(fallback.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return Status::refused("cuBLASLt cannot be opened: ", dlerror());
  bool complete = true;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(handle, name));
    complete = complete && function != nullptr;
  };
  find(library.create, "cublasLtCreate");
  find(library.destroy, "cublasLtDestroy");
  find(library.matmul, "cublasLtMatmul");
  find(library.desc_create, "cublasLtMatmulDescCreate");
  find(library.desc_destroy, "cublasLtMatmulDescDestroy");
  find(library.desc_set, "cublasLtMatmulDescSetAttribute");
  find(library.layout_create, "cublasLtMatrixLayoutCreate");
  find(library.layout_destroy, "cublasLtMatrixLayoutDestroy");
  find(library.preference_create, "cublasLtMatmulPreferenceCreate");
  find(library.preference_destroy, "cublasLtMatmulPreferenceDestroy");
  find(library.preference_set, "cublasLtMatmulPreferenceSetAttribute");
  find(library.heuristic, "cublasLtMatmulAlgoGetHeuristic");
  find(library.algo_check, "cublasLtMatmulAlgoCheck");
  if (!complete) dlclose(handle);
  return complete ? Status() : Status::refused("cuBLASLt lacks a function this build needs: another major version?");
}

constexpr size_t kWorkspaceBytes = 32 << 20;  // NVIDIA's recommendation for Hopper

cudaDataType_t data_type(DType dtype) {
  return dtype == DType::kFloat32 ? CUDA_R_32F : dtype == DType::kFloat16 ? CUDA_R_16F : CUDA_R_16BF;
}

// Rows of one bucket share an algorithm. Buckets are narrow for small M: there the best tile changes.
int bucket_of(int rows) {
  int bucket = 16;
  while (bucket < rows) bucket = bucket < 1024 ? bucket * 2 : bucket + 1024;
  return bucket;
}

class CublasLt final : public GemmProvider {
 public:
  explicit CublasLt(DType dtype) : dtype_(dtype) {}
  ~CublasLt() override {
    if (handle_ != nullptr) library_.destroy(handle_);
  }
  Status open(const std::string& path) {
    EMBERT_TRY(open_library(path, library_));
    EMBERT_TRY(check(library_.create(&handle_), "cublasLtCreate"));
    return workspace_.allocate(kWorkspaceBytes);
  }
  const char* name() const override { return "cublaslt"; }
  size_t workspace_bytes() const override { return kWorkspaceBytes; }
  bool dependent_launch() const override { return false; }
  bool folds() const override { return false; }
  Status prepare(const LinearWeights& weights, const Stream& stream, std::unique_ptr<Linear>& linear) override;

  static Status check(cublasStatus_t status, const std::string& where) {
    if (status == CUBLAS_STATUS_SUCCESS) return {};
    const std::string message = where + ": cuBLAS status " + std::to_string(int(status));
    const bool is_recoverable = status == CUBLAS_STATUS_ALLOC_FAILED || status == CUBLAS_STATUS_NOT_SUPPORTED;
    return is_recoverable ? Status::refused(message) : Status::lost(message);
  }

 private:
  friend class Matmul;
  friend class CublasLtLinear;

  DType dtype_;
  Library library_;
  cublasLtHandle_t handle_ = nullptr;
  DeviceBuffer workspace_;
};

// Up to this many rows split K is allowed: without it the library's only algorithms for 3 072 columns to 768 and 64
// rows take 17 to 29 µs on an H100, and 7.2 with it. More rows have enough tiles, and their sums keep one order.
constexpr int kSplitRows = 64;
// Nor do more columns need it, such as those of a vocabulary.
constexpr int kSplitColumns = 8192;
// The parts are added in FP32. The other schemes add them in the results' type: two more roundings.
constexpr uint32_t kSplitReductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, kNoSplit = CUBLASLT_REDUCTION_SCHEME_NONE;

// Shape and types of a GEMM.
struct MatmulShape {
  cudaDataType_t operands, results, scalars;
  cublasComputeType_t compute;
  int out, in, pitch;  // pitch: elements from a row of y to the next
};

// y[rows, out] = x[rows, in] · W[out, in]ᵀ (+ residual), and the library's epilogue.
class Matmul {
 public:
  Matmul(CublasLt& owner, const MatmulShape& shape)
      : owner_(owner),
        shape_(shape),
        desc_(owner.library_.desc_destroy),
        weight_layout_(owner.library_.layout_destroy) {}

  Status init() {
    // cuBLAS is column-major: yᵀ[out, rows] = (Wᵀ)ᵀ[out, in] · xᵀ[in, rows].
    EMBERT_TRY(CublasLt::check(owner_.library_.desc_create(desc_.place(), shape_.compute, shape_.scalars),
                               "cublasLtMatmulDescCreate"));
    const cublasOperation_t transpose = CUBLAS_OP_T;
    EMBERT_TRY(set(CUBLASLT_MATMUL_DESC_TRANSA, transpose));
    return make_layout(shape_.operands, shape_.in, shape_.out, shape_.in, weight_layout_);
  }

  template <typename Value>
  Status set(cublasLtMatmulDescAttributes_t attribute, const Value& value) {
    return CublasLt::check(owner_.library_.desc_set(desc_.get(), attribute, &value, sizeof(value)),
                           "cublasLtMatmulDescSetAttribute");
  }

  Status run(const void* weight, const void* x, const void* residual, int rows, void* y, const Stream& stream) {
    const Plan* plan = nullptr;
    EMBERT_TRY(plan_for(rows, residual != nullptr, plan));
    const float numbers[] = {0.0f, 1.0f};
    const cublasStatus_t status =
        owner_.library_.matmul(owner_.handle_, desc_.get(), &numbers[1], weight, weight_layout_.get(), x, plan->x.get(),
                               &numbers[residual != nullptr], residual != nullptr ? residual : y, plan->y.get(), y,
                               plan->y.get(), &plan->algo, owner_.workspace_.as(), kWorkspaceBytes, stream.handle);
    return CublasLt::check(status, "cublasLtMatmul (" + size(rows) + ")");
  }

 private:
  struct Plan {
    explicit Plan(const Library& library) : x(library.layout_destroy), y(library.layout_destroy) {}
    Layout x, y;  // of this number of rows
    cublasLtMatmulAlgo_t algo{};
  };

  std::string size(int rows) const {
    return std::to_string(rows) + " rows, " + std::to_string(shape_.in) + " to " + std::to_string(shape_.out);
  }

  Status make_layout(cudaDataType_t type, int width, int rows, int pitch, Layout& layout) const {
    return CublasLt::check(owner_.library_.layout_create(layout.place(), type, width, rows, pitch),
                           "cublasLtMatrixLayoutCreate");
  }
  Status make_layouts(int rows, Plan& plan) const {
    EMBERT_TRY(make_layout(shape_.operands, shape_.in, rows, shape_.in, plan.x));
    return make_layout(shape_.results, shape_.out, rows, shape_.pitch, plan.y);
  }

  // Layouts are exact. Algorithms are selected once per bucket: a call of the heuristic takes tens of microseconds.
  Status plan_for(int rows, bool residual, const Plan*& plan) {
    const auto key = std::make_pair(rows, residual);
    if (const auto cached = plans_.find(key); cached != plans_.end()) {
      plan = &cached->second;
      return {};
    }
    if (plans_.size() > 4096) plans_.clear();
    return make_plan(rows, residual, plan);
  }

  Status make_plan(int rows, bool residual, const Plan*& plan) {
    const Library& library = owner_.library_;
    Plan new_plan(library);
    EMBERT_TRY(make_layouts(rows, new_plan));
    const auto key = std::make_pair(bucket_of(rows), residual);
    auto algo = algos_.find(key);
    if (algo == algos_.end()) {
      // For the bucket's own size: the best algorithm for 1 row, a matrix-vector kernel, may not support 15 rows, and
      // it rounds differently.
      cublasLtMatmulAlgo_t cached{};
      EMBERT_TRY(best_algo(key.first, cached));
      algo = algos_.emplace(key, cached).first;
    }
    new_plan.algo = algo->second;
    cublasLtMatmulHeuristicResult_t checked{};
    const cublasStatus_t fits = library.algo_check(owner_.handle_, desc_.get(), weight_layout_.get(), new_plan.x.get(),
                                                   new_plan.y.get(), new_plan.y.get(), &new_plan.algo, &checked);
    if (fits != CUBLAS_STATUS_SUCCESS) EMBERT_TRY(best_algo(rows, new_plan.algo));
    plan = &plans_.emplace(std::make_pair(rows, residual), std::move(new_plan)).first->second;
    return {};
  }

  Status best_algo(int rows, cublasLtMatmulAlgo_t& algo) {
    const Library& library = owner_.library_;
    Plan of_rows(library);
    EMBERT_TRY(make_layouts(rows, of_rows));
    UniqueHandle<cublasLtMatmulPreference_t> preference(library.preference_destroy);
    EMBERT_TRY(CublasLt::check(library.preference_create(preference.place()), "cublasLtMatmulPreferenceCreate"));
    const size_t workspace = kWorkspaceBytes;
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
      return CublasLt::check(library.preference_set(preference.get(), attribute, &value, sizeof(value)),
                             "cublasLtMatmulPreferenceSetAttribute");
    };
    EMBERT_TRY(prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace));
    const uint32_t reductions = rows <= kSplitRows && shape_.out <= kSplitColumns ? kSplitReductions : kNoSplit;
    EMBERT_TRY(prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions));
    cublasLtMatmulHeuristicResult_t result{};
    int cached = 0;
    const cublasStatus_t status =
        library.heuristic(owner_.handle_, desc_.get(), weight_layout_.get(), of_rows.x.get(), of_rows.y.get(),
                          of_rows.y.get(), preference.get(), 1, &result, &cached);
    if (status != CUBLAS_STATUS_SUCCESS || cached == 0) {
      return Status::refused("cuBLASLt has no algorithm for ", size(rows));
    }
    algo = result.algo;
    return {};
  }

  CublasLt& owner_;
  MatmulShape shape_;
  UniqueHandle<cublasLtMatmulDesc_t> desc_;
  Layout weight_layout_;
  std::map<std::pair<int, bool>, Plan> plans_;                  // by rows
  std::map<std::pair<int, bool>, cublasLtMatmulAlgo_t> algos_;  // by bucket
};

class CublasLtLinear final : public Linear {
 public:
  CublasLtLinear(CublasLt& owner, const LinearWeights& weights)
      : owner_(owner), weights_(weights), product_(owner, shape(owner.dtype_, weights)) {}

  Status init(const Stream& stream) {
    EMBERT_TRY(product_.init());
    EMBERT_TRY(product_.set(CUBLASLT_MATMUL_DESC_EPILOGUE, weights_.activation == Activation::kRelu
                                                               ? CUBLASLT_EPILOGUE_RELU_BIAS
                                                               : CUBLASLT_EPILOGUE_BIAS));
    // The library adds the bias in y's type.
    EMBERT_TRY(bias_.allocate(size_t(weights_.n) * bytes_of(owner_.dtype_)));
    EMBERT_TRY(convert(DType::kFloat32, weights_.bias, owner_.dtype_, bias_.as(), weights_.n, stream));
    EMBERT_TRY(product_.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias_.as()));
    return product_.set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(owner_.dtype_));
  }

  Status run(const RowView& x, const RowView& residual, int rows, void* y, float2* y_stats, int&,
             const Stream& stream) override {
    if (rows == 0) return {};
    EMBERT_TRY(check_operands(x, residual, y, y_stats));
    if (x.stats != nullptr || residual.stats != nullptr || y_stats != nullptr)
      return Status::refused("cuBLASLt folds no LayerNorm");
    EMBERT_TRY(product_.run(weights_.weight, x.data, residual.data, rows, y, stream));
    if (weights_.activation == Activation::kGeluErf || weights_.activation == Activation::kGeluTanh) {
      return activate_rows(owner_.dtype_, weights_.activation, rows, weights_.n, y, stream);
    }
    return {};
  }

 private:
  static MatmulShape shape(DType dtype, const LinearWeights& weights) {
    const cudaDataType_t type = data_type(dtype);
    const int pitch = weights.pitch == 0 ? weights.n : weights.pitch;
    return {type, type, CUDA_R_32F, CUBLAS_COMPUTE_32F, weights.n, weights.k, pitch};
  }

  CublasLt& owner_;
  LinearWeights weights_;
  Matmul product_;
  DeviceBuffer bias_;
};

Status CublasLt::prepare(const LinearWeights& weights, const Stream& stream, std::unique_ptr<Linear>& linear) {
  if (weights.scales != nullptr) return Status::refused("cuBLASLt multiplies no int8 here");
  if (weights.input_norm.gamma != nullptr || weights.residual_norm.gamma != nullptr)
    return Status::refused("cuBLASLt folds no LayerNorm");
  auto created = std::make_unique<CublasLtLinear>(*this, weights);
  EMBERT_TRY(created->init(stream));
  linear = std::move(created);
  return {};
}

}  // namespace

Status make_cublaslt(DType dtype, const std::string& library, std::unique_ptr<GemmProvider>& provider) {
  auto created = std::make_unique<CublasLt>(dtype);
  EMBERT_TRY(created->open(library));
  provider = std::move(created);
  return {};
}

}  // namespace embert

#else

namespace embert {

Status make_cublaslt(DType, const std::string&, std::unique_ptr<GemmProvider>&) {
  return Status::refused("this build has no cuBLASLt (its header was not there); on this device and type it is needed");
}

}  // namespace embert

#endif
