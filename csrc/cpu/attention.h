// Attention on packed sequences. kernels.h describes it.
#pragma once

#include "cpu/kernels.h"
#include "cpu/simd.h"

namespace embert::cpu::EMBERT_ISA {

void attend(const float* qkv, const SequenceGroup& group, const Positions& positions, int heads, int size,
            float* context, int threads, const DistanceRows& distances);

}  // namespace embert::cpu::EMBERT_ISA
