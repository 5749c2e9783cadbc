// The ping-pong GEMM: y[rows, out] = activation(x[rows, in] · W[out, in]ᵀ + bias) on Hopper for many rows: QKV and FFN
// in.
//
// Two consumers have a tile of 128 × 128 each. One multiplies during the other's epilogue, so the tensor cores do not
// wait for epilogues. While K is short this gains more than the wider tile of cooperative.cuh, which reads less shared
// memory: 26 368 rows take 198 µs instead of 212 (768 to 3 072, GELU), 45 instead of 50 (384 to 1 152). At K = 3 072
// the wider tile is faster (187, 210).
//
// With no more tiles than blocks, ping-pong gains nothing. Then a block's consumers share its tile, 64 rows each, and
// its epilogue takes half the time (1 024 rows, 384 to 1 536: 8.2 µs against 9.0).
//
// The main loop is mainloop/pingpong.cuh. The epilogue applies the LayerNorm of x (EPILOGUES.md).
#pragma once

#include "common/launch.cuh"
#include "gemm/epilogue/store.cuh"

namespace embert::sm90 {

// kPingPong: consumers have different tiles; otherwise they share each tile.
template <typename T, Activation kActivation, bool kPingPong, bool kPrescaledRows>
__global__ void __launch_bounds__(PingPongShape::kThreads, 1)
    pingpong_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                    const __grid_constant__ CUtensorMap y_map, const GemmArguments args) {
  EMBERT_SM90A("pingpong_kernel", run_pingpong<T, kPingPong, StoreEpilogue<T, kActivation, kPingPong, kPrescaledRows>>(
                                      x_map, w_map, y_map, args));
}

}  // namespace embert::sm90
