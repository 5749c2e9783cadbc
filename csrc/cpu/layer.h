// A whole layer of a BERT-like encoder.
#pragma once

#include <vector>

#include "cpu/kernels.h"

namespace embert::cpu {

// LayerNorm after a residual: [hidden] each.
struct Norm {
  const float *gamma, *beta;
  float epsilon;
};

// Attention and the feed-forward layer, each added to its input row, and then normalized. One short text spends a tenth
// of its time between these kernels if each is called from Python.
class Layer {
 public:
  // The linear layers must outlive this one; norms are copied.
  Layer(const Kernels& kernels, const LinearLayer& qkv, const LinearLayer& projection, const LinearLayer& inner,
        const LinearLayer& outer, Activation activation, const Norm& attention_norm, const Norm& norm, int heads);

  // x [rows, hidden] → y [rows, hidden]. `groups` cover all rows in order.
  void operator()(const float* x, int rows, const std::vector<SequenceGroup>& groups, const Positions& positions,
                  float* y, int threads) const;

 private:
  const Kernels& kernels_;
  const LinearLayer &qkv_, &projection_, &inner_, &outer_;
  Activation activation_;
  std::vector<float> norms_;  // gamma, beta, gamma, beta
  float attention_epsilon_, epsilon_;
  int heads_;
};

}  // namespace embert::cpu
