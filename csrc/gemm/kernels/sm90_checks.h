// The weights that our Hopper kernels support. Plain C++, so that the refusals have host tests.
#pragma once

#include "gemm/gemm.h"

namespace embert::sm90 {

// The multiplication with which TileScheduler computes a tile's row is exact up to 362 tiles across: of at most
// 4 194 240 rows there are 16 384 tiles of a cluster.
constexpr int kMaxGemmColumns = 360 * 128;

// Preconditions of RoPE and of gates.
inline Status check_fused(const LinearWeights& weights) {
  if (weights.gated && weights.residual_norm.gamma != nullptr)
    return Status::refused("hopper gemm: gates and a residual");
  if (weights.gated && weights.activation == Activation::kNone)
    return Status::refused("hopper gemm: gates without an activation");
  if (!weights.gated && weights.activation == Activation::kSilu)
    return Status::refused("hopper gemm: SiLU without gates");
  if (weights.rope == nullptr) return {};
  const RopeColumns& rope = *weights.rope;
  if (weights.gated || weights.activation != Activation::kNone || weights.residual_norm.gamma != nullptr)
    return Status::refused("hopper gemm: RoPE columns and an activation, gates or a residual");
  const bool fits = rope.head_size > 0 && rope.head_size % 8 == 0 && rope.rotary_dim >= 0 && rope.rotary_dim % 2 == 0 &&
                    rope.rotary_dim <= rope.head_size && rope.columns % rope.head_size == 0 &&
                    rope.columns <= weights.n;
  if (fits && rope.table != nullptr && rope.positions != nullptr) return {};
  return Status::refused("hopper gemm: ", rope.rotary_dim, " RoPE columns of heads of ", rope.head_size, ", in ",
                         rope.columns, " of ", weights.n);
}

// Preconditions of all GEMMs of 16-bit types.
inline Status check_weights(const LinearWeights& weights) {
  if (weights.pitch != 0) return Status::refused("hopper gemm: rows of y lie end to end");
  if (weights.k % 8 != 0 || weights.n % 8 != 0) return Status::refused("hopper gemm: sizes must be multiples of 8");
  if (weights.residual_norm.gamma != nullptr && weights.activation != Activation::kNone)
    return Status::refused("hopper gemm: a residual and an activation");
  if (weights.input_norm.gamma != nullptr && !weights.prescaled_rows && weights.exact == nullptr)
    return Status::refused("hopper gemm: weights are folded from FP32 ones, which are not there");
  if (weights.input_norm.gamma != nullptr && weights.k > kMaxStatColumns)
    return Status::refused("hopper gemm: a LayerNorm of more than ", kMaxStatColumns, " columns");
  if (weights.rms && weights.residual_norm.gamma != nullptr && !weights.prescaled_rows)
    return Status::refused("hopper gemm: an RMSNorm of the residual");
  const int w_rows = weights.gated ? 2 * weights.n : weights.n;
  if (w_rows > kMaxGemmColumns)
    return Status::refused("hopper gemm: ", w_rows, " columns, at most ", kMaxGemmColumns, " can be run");
  return check_fused(weights);
}

}  // namespace embert::sm90
