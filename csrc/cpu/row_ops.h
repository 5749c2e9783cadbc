// Operations on rows: the embedding, LayerNorm and RMSNorm, means of sequences. kernels.h describes them.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/simd.h"

namespace embert::cpu::EMBERT_ISA {

void normalize(const float* x, int rows, int columns, const float* gamma, const float* beta, float epsilon, float* y,
               int threads);
bool embed(const std::int64_t* ids, const std::int64_t* position_ids, int tokens, const Table& words,
           const Table& positions, int columns, const float* gamma, const float* beta, float epsilon, float* y,
           int threads);
void mean(const float* x, int sequences, int length, int columns, float* y, int threads);

}  // namespace embert::cpu::EMBERT_ISA
