// LayerNorm and RMSNorm on a CPU with AVX-512.
#pragma once

namespace embert::cpu {

// x [rows, columns] → y, which may be x. With beta (x - mean) / √(variance + epsilon) · gamma + beta; without, `beta`
// null, x / √(mean square + epsilon) · gamma. `gamma` and `beta` are [columns].
void normalize(const float* x, int rows, int columns, const float* gamma, const float* beta, float epsilon, float* y,
               int threads);

}  // namespace embert::cpu
