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

// The functions of the library, by their own names.
struct Library {
  // clang-format off
#define EMBERT_FUNCTIONS(with)                                                                                 \
  with(cublasLtCreate) with(cublasLtDestroy) with(cublasLtMatmul)                                              \
  with(cublasLtMatmulDescCreate) with(cublasLtMatmulDescDestroy) with(cublasLtMatmulDescSetAttribute)          \
  with(cublasLtMatrixLayoutCreate) with(cublasLtMatrixLayoutDestroy) with(cublasLtMatmulAlgoCheck)             \
  with(cublasLtMatmulPreferenceCreate) with(cublasLtMatmulPreferenceDestroy)                                   \
  with(cublasLtMatmulPreferenceSetAttribute) with(cublasLtMatmulAlgoGetHeuristic)
// clang-format on
#define EMBERT_MEMBER(function) decltype(&::function) function = nullptr;
  EMBERT_FUNCTIONS(EMBERT_MEMBER)
#undef EMBERT_MEMBER
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
#define EMBERT_FIND(function) find(library.function, #function);
  EMBERT_FUNCTIONS(EMBERT_FIND)
#undef EMBERT_FIND
#undef EMBERT_FUNCTIONS
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
    if (handle_ != nullptr) library_.cublasLtDestroy(handle_);
  }
  Status open(const std::string& path) {
    EMBERT_TRY(open_library(path, library_));
    EMBERT_TRY(check(library_.cublasLtCreate(&handle_), "cublasLtCreate"));
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

// y[rows, out] = x[rows, in] · W[out, in]ᵀ + bias (+ residual), with the library's or our own activation.
class CublasLtLinear final : public Linear {
 public:
  CublasLtLinear(CublasLt& owner, const LinearWeights& weights)
      : owner_(owner),
        library_(owner.library_),
        weights_(weights),
        desc_(library_.cublasLtMatmulDescDestroy),
        weight_layout_(library_.cublasLtMatrixLayoutDestroy) {}

  Status init(const Stream& stream) {
    // cuBLAS is column-major: yᵀ[out, rows] = (Wᵀ)ᵀ[out, in] · xᵀ[in, rows].
    EMBERT_TRY(CublasLt::check(library_.cublasLtMatmulDescCreate(desc_.place(), CUBLAS_COMPUTE_32F, CUDA_R_32F),
                               "cublasLtMatmulDescCreate"));
    const cublasOperation_t transpose = CUBLAS_OP_T;
    EMBERT_TRY(set(CUBLASLT_MATMUL_DESC_TRANSA, transpose));
    EMBERT_TRY(make_layout(weights_.k, weights_.n, weights_.k, weight_layout_));
    EMBERT_TRY(set(CUBLASLT_MATMUL_DESC_EPILOGUE,
                   weights_.activation == Activation::kRelu ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_BIAS));
    // The library adds the bias in y's type.
    EMBERT_TRY(bias_.allocate(size_t(weights_.n) * bytes_of(owner_.dtype_)));
    EMBERT_TRY(convert(DType::kFloat32, weights_.bias, owner_.dtype_, bias_.as(), weights_.n, stream));
    EMBERT_TRY(set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias_.as()));
    return set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(owner_.dtype_));
  }

  Status run(const RowView& x, const RowView& residual, int rows, void* y, float2* y_stats, int&,
             const Stream& stream) override {
    if (rows == 0) return {};
    EMBERT_TRY(check_operands(x, residual, y, y_stats));
    if (x.stats != nullptr || residual.stats != nullptr || y_stats != nullptr)
      return Status::refused("cuBLASLt folds no LayerNorm");
    const bool adds = residual.data != nullptr;
    const Plan* plan = nullptr;
    EMBERT_TRY(plan_for(rows, adds, plan));
    const float numbers[] = {0.0f, 1.0f};
    const cublasStatus_t status =
        library_.cublasLtMatmul(owner_.handle_, desc_.get(), &numbers[1], weights_.weight, weight_layout_.get(), x.data,
                                plan->x.get(), &numbers[adds], adds ? residual.data : y, plan->y.get(), y,
                                plan->y.get(), &plan->algo, owner_.workspace_.as(), kWorkspaceBytes, stream.handle);
    EMBERT_TRY(CublasLt::check(status, "cublasLtMatmul (" + size(rows) + ")"));
    if (weights_.activation != Activation::kGeluErf && weights_.activation != Activation::kGeluTanh) return {};
    return activate_rows(owner_.dtype_, weights_.activation, rows, weights_.n, y, stream);
  }

 private:
  struct Plan {
    explicit Plan(const Library& library)
        : x(library.cublasLtMatrixLayoutDestroy), y(library.cublasLtMatrixLayoutDestroy) {}

    Layout x, y;  // of this number of rows
    cublasLtMatmulAlgo_t algo{};
  };

  template <typename Value>
  Status set(cublasLtMatmulDescAttributes_t attribute, const Value& value) {
    return CublasLt::check(library_.cublasLtMatmulDescSetAttribute(desc_.get(), attribute, &value, sizeof(value)),
                           "cublasLtMatmulDescSetAttribute");
  }

  std::string size(int rows) const {
    return std::to_string(rows) + " rows, " + std::to_string(weights_.k) + " to " + std::to_string(weights_.n);
  }

  Status make_layout(int width, int rows, int pitch, Layout& layout) const {
    return CublasLt::check(
        library_.cublasLtMatrixLayoutCreate(layout.place(), data_type(owner_.dtype_), width, rows, pitch),
        "cublasLtMatrixLayoutCreate");
  }
  Status make_layouts(int rows, Plan& plan) const {
    EMBERT_TRY(make_layout(weights_.k, rows, weights_.k, plan.x));
    return make_layout(weights_.n, rows, weights_.pitch == 0 ? weights_.n : weights_.pitch, plan.y);
  }

  // Layouts are exact. Algorithms are selected once per bucket: a call of the heuristic takes tens of microseconds.
  Status plan_for(int rows, bool residual, const Plan*& plan) {
    const auto key = std::make_pair(rows, residual);
    if (const auto cached = plans_.find(key); cached != plans_.end()) {
      plan = &cached->second;
      return {};
    }
    if (plans_.size() > 4096) plans_.clear();
    Plan new_plan(library_);
    EMBERT_TRY(make_layouts(rows, new_plan));
    const auto bucket = std::make_pair(bucket_of(rows), residual);
    auto algo = algos_.find(bucket);
    if (algo == algos_.end()) {
      // For the bucket's own size: the best algorithm for 1 row, a matrix-vector kernel, may not support 15 rows, and
      // it rounds differently.
      cublasLtMatmulAlgo_t cached{};
      EMBERT_TRY(best_algo(bucket.first, cached));
      algo = algos_.emplace(bucket, cached).first;
    }
    new_plan.algo = algo->second;
    cublasLtMatmulHeuristicResult_t checked{};
    const cublasStatus_t fits =
        library_.cublasLtMatmulAlgoCheck(owner_.handle_, desc_.get(), weight_layout_.get(), new_plan.x.get(),
                                         new_plan.y.get(), new_plan.y.get(), &new_plan.algo, &checked);
    if (fits != CUBLAS_STATUS_SUCCESS) EMBERT_TRY(best_algo(rows, new_plan.algo));
    plan = &plans_.emplace(key, std::move(new_plan)).first->second;
    return {};
  }

  Status best_algo(int rows, cublasLtMatmulAlgo_t& algo) {
    Plan of_rows(library_);
    EMBERT_TRY(make_layouts(rows, of_rows));
    UniqueHandle<cublasLtMatmulPreference_t> preference(library_.cublasLtMatmulPreferenceDestroy);
    EMBERT_TRY(
        CublasLt::check(library_.cublasLtMatmulPreferenceCreate(preference.place()), "cublasLtMatmulPreferenceCreate"));
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
      return CublasLt::check(
          library_.cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof(value)),
          "cublasLtMatmulPreferenceSetAttribute");
    };
    EMBERT_TRY(prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes));
    const bool may_split = rows <= kSplitRows && weights_.n <= kSplitColumns;
    EMBERT_TRY(prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, may_split ? kSplitReductions : kNoSplit));
    cublasLtMatmulHeuristicResult_t result{};
    int count = 0;
    const cublasStatus_t status =
        library_.cublasLtMatmulAlgoGetHeuristic(owner_.handle_, desc_.get(), weight_layout_.get(), of_rows.x.get(),
                                                of_rows.y.get(), of_rows.y.get(), preference.get(), 1, &result, &count);
    if (status != CUBLAS_STATUS_SUCCESS || count == 0)
      return Status::refused("cuBLASLt has no algorithm for ", size(rows));
    algo = result.algo;
    return {};
  }

  CublasLt& owner_;
  const Library& library_;
  LinearWeights weights_;
  UniqueHandle<cublasLtMatmulDesc_t> desc_;
  Layout weight_layout_;
  DeviceBuffer bias_;
  std::map<std::pair<int, bool>, Plan> plans_;                  // by rows
  std::map<std::pair<int, bool>, cublasLtMatmulAlgo_t> algos_;  // by bucket
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
