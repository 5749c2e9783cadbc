// The functions of `Kernels` for one instruction set. kernels.h describes them.
#pragma once

#include <cstdint>
#include <memory>

#include "cpu/kernels.h"
#include "cpu/simd.h"

namespace embert::cpu::EMBERT_ISA {

std::unique_ptr<LinearLayer> linear(const float* weight, const float* bias, int out, int in);
std::unique_ptr<LinearLayer> int8_linear(const std::int8_t* weight, const float* scales, const float* bias, int out,
                                         int in);
void normalize(const float* x, int rows, int columns, const float* gamma, const float* beta, float epsilon, float* y,
               int threads);
bool embed(const std::int64_t* ids, const std::int64_t* position_ids, int tokens, const Table& words,
           const Table& positions, int columns, const float* gamma, const float* beta, float epsilon, float* y,
           int threads);
void mean(const float* x, int sequences, int length, int columns, float* y, int threads);
void attend(const float* qkv, const SequenceGroup& group, const Positions& positions, int heads, int size,
            float* context, int threads, const DistanceRows& distances);

}  // namespace embert::cpu::EMBERT_ISA
