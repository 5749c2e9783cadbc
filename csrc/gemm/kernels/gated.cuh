// Gated inner GEMMs: y[rows, out] = activation(gate)·value, from W[2·out, in] with rows gate, value, gate, value, ….
// The main loops are those of pingpong.cuh and small_m.cuh; a thread holds a gate and its value. A tile of 128 rows of
// W makes 64 columns of y, one box, so half as many bytes are stored as without gates.
//
// Gated GEMMs never use cooperative.cuh: K is a hidden size, for which ping-pong is as fast or faster.
#pragma once

#include "common/numeric.cuh"
#include "gemm/epilogue/finish.cuh"
#include "gemm/epilogue/store.cuh"
#include "gemm/kernels/small_m.cuh"

namespace embert::sm90 {

// The factor of a gate before its activation. The value has no factor: its constants and its row's scale are
// multiplied by 1 / kGateFactor, a power of two.
constexpr float kGateFactor = 0.5f;

// activation(x) from h = x/2. SiLU is x·σ(x) = h + h·tanh(h), because σ(x) = ½(1 + tanh(x/2)); tanh.approx adds at most
// 2.4e-4·|x|, as in GELU.
template <Activation kActivation>
__device__ __forceinline__ float gate_activation(float h) {
  if constexpr (kActivation == Activation::kSilu) {
    return fmaf(h, tanh_approximate(h), h);
  } else if constexpr (kActivation == Activation::kRelu) {
    return fmaxf(h + h, 0.0f);
  } else {
    static_assert(activation_factor(kActivation) == kGateFactor, "an activation of x/2");
    return activate<kActivation, false>(h);
  }
}

// An element of y from a gate and its value. `constants`: their columns' constants, the gate's times kGateFactor
// (fold.cuh); `scale`: the row's scale and shift times kGateFactor.
template <Activation kActivation, bool kPrescaledRows>
__device__ __forceinline__ float gated(float gate, float value, ColumnPair<false, kPrescaledRows> constants,
                                       float2 scale) {
  const float2 value_scale = {scale.x * (1.0f / kGateFactor), scale.y * (1.0f / kGateFactor)};
  if constexpr (kPrescaledRows) {
    gate = fmaf(gate, scale.x, fmaf(constants.x, scale.y, constants.y));
    value = fmaf(value, value_scale.x, fmaf(constants.z, value_scale.y, constants.w));
  } else {
    gate = fmaf(gate, scale.x, constants.x);
    value = fmaf(value, value_scale.x, constants.y);
  }
  return gate_activation<kActivation>(gate) * value;
}

// In two adjacent m16n8 tiles a lane has one element of y each, `first` and `second`, in column lane % 4 of four. Two
// lanes exchange elements, so that each can store two adjacent ones: the even lane gets both of the first tile, the
// odd lane both of the second. They begin at column gated_column of the eight.
template <typename T>
__device__ __forceinline__ uint32_t pack_with_lane_neighbor(float first, float second, int lane) {
  const uint32_t own = pack_two<T>(first, second), other = __shfl_xor_sync(~0u, own, 1);
  return __byte_perm(own, other, lane % 2 == 0 ? 0x5410 : 0x3276);
}
__device__ __forceinline__ int gated_column(int lane) {
  return 4 * (lane % 2) + (lane & 2);
}

// The store epilogue (store.cuh) with gates. A consumer has a staging box for each 64 of its rows.
template <typename T, Activation kActivation, bool kPingPong, bool kPrescaledRows>
class GatedEpilogue : public TileRows<kPingPong, kPrescaledRows> {
  using Base = TileRows<kPingPong, kPrescaledRows>;
  using Shape = PingPongShape;
  using Base::kHalves, Base::lane_, Base::tiles_, Base::columns_, Base::row_, Base::column_;
  static_assert(kHalves <= Shape::kBoxes, "a box for each 64 rows");

 public:
  using Base::Base;

  __device__ __forceinline__ void after(const float (&c)[kHalves][Shape::kColumns / 2], int /* ordinal */, int next) {
    float2 scale[kHalves][2];
    this->compute_row_scales(kGateFactor, scale);
    if (next < tiles_.end) {
      this->prefetch_columns(next);
      this->prefetch_row_stats(next);
    }
    const int in_chunk = 2 * gated_column(lane_);  // bytes
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const uint32_t box_at = this->staging_ + half * kBoxBytes;
      wait_for_box<kHalves - 1>(lane_);
#pragma unroll
      for (int chunk = 0; chunk < Shape::kColumns / 16; ++chunk) {  // 8 columns of y
        typename Base::Pair column_constants[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) column_constants[i] = columns_[chunk * 8 + i * 4 + lane_ % 4];
#pragma unroll
        for (int row_half = 0; row_half < 2; ++row_half) {  // rows lane / 4 and lane / 4 + 8
          float y[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int element = 8 * chunk + 4 * i + 2 * row_half;
            y[i] = gated<kActivation, kPrescaledRows>(c[half][element], c[half][element + 1], column_constants[i],
                                                      scale[half][row_half]);
          }
          st_shared(box_at + swizzle_128b(lane_ / 4 + 8 * row_half, chunk) + in_chunk,
                    pack_with_lane_neighbor<T>(y[0], y[1], lane_));
        }
      }
      store_box(this->y_map_, box_at, column_ / 2, row_ + half * 64, lane_);
    }
  }
};

template <typename T, Activation kActivation, bool kPingPong, bool kPrescaledRows>
__global__ void __launch_bounds__(PingPongShape::kThreads, 1)
    pingpong_gated_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                          const __grid_constant__ CUtensorMap y_map, const GemmArguments args) {
  EMBERT_SM90A(
      "pingpong_gated_kernel",
      run_pingpong<T, kPingPong, GatedEpilogue<T, kActivation, kPingPong, kPrescaledRows>>(x_map, w_map, y_map, args));
}

// The epilogue of small M (small_m.cuh) with gates.
template <typename T, typename Shape, Activation kActivation, bool kPrescaledRowsValue>
struct SmallMGated {
  static constexpr bool kResidual = false, kPrescaledRows = kPrescaledRowsValue, kGates = true;
  static constexpr float kFactor = kGateFactor;
  struct Operands {};
  __device__ __forceinline__ void prefetch(const SmallMPosition&, Operands&) const {}

  template <int kChunks>
  __device__ __forceinline__ void store(const GemmArguments& args, const SmallMPosition& position,
                                        const float (&c)[8 * kChunks],
                                        const ColumnPair<false, kPrescaledRows> (&columns)[kChunks][2],
                                        const float2 (&scale)[2]) const {
    const int out = args.n / 2, first_column = position.column / 2 + gated_column(position.lane);  // of y
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int row_half = 0; row_half < 2; ++row_half) {  // rows lane / 4 and lane / 4 + 8
        float y[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int element = 8 * chunk + 4 * i + 2 * row_half;
          y[i] = gated<kActivation, kPrescaledRows>(c[element], c[element + 1], columns[chunk][i], scale[row_half]);
        }
        const uint32_t two = pack_with_lane_neighbor<T>(y[0], y[1], position.lane);
        const int row = position.row + 8 * row_half, column = first_column + chunk * 8;
        if (row < position.rows && column < out)
          *reinterpret_cast<uint32_t*>(static_cast<T*>(args.y) + size_t(row) * out + column) = two;
      }
    }
  }
};

template <typename T, typename Shape, Activation kActivation, bool kPrescaledRows>
__global__ void __launch_bounds__(kSmallMThreads, 2)
    small_m_gated_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                         const GemmArguments args, int x_rows, int stages) {
  EMBERT_SM90A("small_m_gated_kernel", small_m_tile<T, Shape>(x_map, w_map, args, x_rows, stages,
                                                              SmallMGated<T, Shape, kActivation, kPrescaledRows>()));
}

}  // namespace embert::sm90
