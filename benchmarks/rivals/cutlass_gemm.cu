// y[rows, out] = activation(x[rows, in] · weight[out, in]ᵀ + bias[out] (+ residual[rows, out])), FP16 with FP32 sums,
// by CUTLASS's collective builders for Hopper: what that library offers without writing a kernel.
//
// Compiled once for each of the two schedules and four epilogues that cutlass.py names; a minute each.
//   -DCOOPERATIVE=0: ping-pong, 128×128 tiles; 1: cooperative, 128×256 tiles; 64 of K a step, clusters of 2×1 in both
//   -DEPILOGUE=0: bias; 1: bias, GELU by erff; 2: bias, GELU by tanh.approx; 3: bias, residual

#include <cuda_fp16.h>
#include <cutlass/cutlass.h>
#include <cutlass/epilogue/thread/activation.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>

#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/fusion/operations.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/kernel_hardware_info.hpp>
#include <cutlass/util/packed_stride.hpp>
#include <type_traits>

#if !defined(COOPERATIVE) || !defined(EPILOGUE)
#error "compile through cutlass.py: COOPERATIVE and EPILOGUE choose the kernel"
#endif

namespace {

using cute::_1;
using cute::_2;
using Half = cutlass::half_t;
constexpr int kAlignment = 8;  // elements: 16 bytes
constexpr bool kHasResidual = EPILOGUE == 3;

using Tile = cute::Shape<cute::_128, std::conditional_t<COOPERATIVE, cute::_256, cute::_128>, cute::_64>;
using Cluster = cute::Shape<_2, _1, _1>;
using MainSchedule = std::conditional_t<COOPERATIVE, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                                        cutlass::gemm::KernelTmaWarpSpecializedPingpong>;
using EpilogueSchedule = std::conditional_t<COOPERATIVE, cutlass::epilogue::TmaWarpSpecializedCooperative,
                                            cutlass::epilogue::TmaWarpSpecialized>;

// A bias for each of the matrix's columns. Without a residual C does not exist and is not read.
using Source = std::conditional_t<kHasResidual, Half, void>;
#if EPILOGUE == 1 || EPILOGUE == 2
template <typename T>
using Gelu =
    std::conditional_t<EPILOGUE == 1, cutlass::epilogue::thread::GELU<T>, cutlass::epilogue::thread::GELU_taylor<T>>;
using Fusion = cutlass::epilogue::fusion::LinCombPerColBiasEltAct<Gelu, Half, float, Half, Source, float>;
#else
using Fusion = cutlass::epilogue::fusion::LinCombPerColBias<Half, float, Half, Source, float>;
#endif

using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto,
    float, float, Source, cutlass::layout::RowMajor, kAlignment, Half, cutlass::layout::RowMajor, kAlignment,
    EpilogueSchedule, Fusion>::CollectiveOp;

using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Half, cutlass::layout::RowMajor, kAlignment, Half,
    cutlass::layout::ColumnMajor, kAlignment, float, Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
    MainSchedule>::CollectiveOp;

using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

int multiprocessors() {
  static const int count = cutlass::KernelHardwareInfo::query_device_multiprocessor_count();
  return count;
}

}  // namespace

// Launches on `stream` and returns at once: null, or an error message. `swizzle` (1, 2, 4, 8) is the width in tiles of
// the bands in which the scheduler walks the result.
extern "C" const char* cutlass_gemm(const void* x, const void* weight, const void* bias, const void* residual, void* y,
                                    int rows, int out, int in, int swizzle, void* stream) {
  typename Gemm::Arguments arguments{};
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  arguments.problem_shape = {rows, out, in, 1};
  arguments.mainloop.ptr_A = static_cast<const Half*>(x);
  arguments.mainloop.dA = cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, {rows, in, 1});
  arguments.mainloop.ptr_B = static_cast<const Half*>(weight);
  arguments.mainloop.dB = cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, {out, in, 1});
  arguments.epilogue.thread.alpha = 1.0f;
  arguments.epilogue.thread.beta = kHasResidual ? 1.0f : 0.0f;
  arguments.epilogue.thread.bias_ptr = static_cast<const Half*>(bias);
  if constexpr (kHasResidual) arguments.epilogue.ptr_C = static_cast<const Half*>(residual);
  arguments.epilogue.dC = cutlass::make_cute_packed_stride(typename Kernel::StrideC{}, {rows, out, 1});
  arguments.epilogue.ptr_D = static_cast<Half*>(y);
  arguments.epilogue.dD = cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, {rows, out, 1});
  arguments.hw_info.sm_count = multiprocessors();
  arguments.scheduler.max_swizzle_size = swizzle;

  if (Gemm::get_workspace_size(arguments) != 0) return "this kernel needs a workspace, and none is allocated";
  Gemm gemm;
  cutlass::Status status = gemm.can_implement(arguments);
  if (status != cutlass::Status::kSuccess) return cutlass::cutlassGetStatusString(status);
  status = gemm.initialize(arguments, nullptr, static_cast<cudaStream_t>(stream));
  if (status != cutlass::Status::kSuccess) return cutlass::cutlassGetStatusString(status);
  status = gemm.run(static_cast<cudaStream_t>(stream));
  return status == cutlass::Status::kSuccess ? nullptr : cutlass::cutlassGetStatusString(status);
}
