// Checks of GEMMs with RoPE or gates: shapes that our kernels do not support. Host code, tested without a GPU.
#pragma once

#include <string>

#include "gemm/gemm.h"

namespace embert::sm90 {

// Preconditions of the kernels with RoPE or gates.
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
  return Status::refused("hopper gemm: " + std::to_string(rope.rotary_dim) + " RoPE columns of heads of " +
                         std::to_string(rope.head_size) + ", in " + std::to_string(rope.columns) + " of " +
                         std::to_string(weights.n));
}

}  // namespace embert::sm90
