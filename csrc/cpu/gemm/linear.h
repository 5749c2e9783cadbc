// Linear layers of one instruction set.
#pragma once

#include <cstdint>
#include <memory>

#include "cpu/kernels.h"
#include "cpu/simd.h"

namespace embert::cpu::EMBERT_ISA {

std::unique_ptr<LinearLayer> linear(const float* weight, const float* bias, int out, int in);
std::unique_ptr<LinearLayer> int8_linear(const std::int8_t* weight, const float* scales, const float* bias, int out,
                                         int in);

}  // namespace embert::cpu::EMBERT_ISA
