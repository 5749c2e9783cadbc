// Prints what Hopper's products refuse of RoPE columns and gates: a line for each case, "fine" or why not.
#include <cstdio>

#include "gemm/kernels/sm90_checks.h"

using namespace embert;

namespace {

void tell(const LinearWeights& weights, const RopeColumns* rope = nullptr) {
  LinearWeights weights_with_rope = weights;
  weights_with_rope.rope = rope;
  const Status found = sm90::check_weights(weights_with_rope);
  std::printf("%s\n", found.ok() ? "fine" : found.message().c_str());
}

}  // namespace

int main() {
  const float2 table[1] = {};
  const int positions[1] = {};
  const float gamma[1] = {};
  LinearWeights plain;
  plain.n = 2304, plain.k = 768;
  LinearWeights gated = plain;
  gated.gated = true, gated.activation = Activation::kSilu;
  const RopeColumns whole{64, 64, 1536, table, positions};
  tell(plain);
  tell(gated);
  tell(plain, &whole);

  LinearWeights with_norm = gated;
  with_norm.residual_norm.gamma = gamma;
  with_norm.activation = Activation::kNone;
  tell(with_norm);
  LinearWeights no_activation = gated;
  no_activation.activation = Activation::kNone;
  tell(no_activation);
  LinearWeights silu = plain;
  silu.activation = Activation::kSilu;
  tell(silu);
  tell(gated, &whole);
  LinearWeights gelu = plain;
  gelu.activation = Activation::kGeluErf;
  tell(gelu, &whole);

  for (const RopeColumns& of :
       {RopeColumns{64, 32, 1536, table, positions}, RopeColumns{24, 24, 1536, table, positions},
        RopeColumns{20, 20, 1520, table, positions}, RopeColumns{64, 33, 1536, table, positions},
        RopeColumns{64, 66, 1536, table, positions}, RopeColumns{64, 64, 1500, table, positions},
        RopeColumns{64, 64, 2368, table, positions}, RopeColumns{64, 64, 1536, nullptr, positions}})
    tell(plain, &of);
  return 0;
}
