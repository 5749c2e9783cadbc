// The table of the kernels of one instruction set.
#include "cpu/functions.h"

namespace embert::cpu::EMBERT_ISA {

#define EMBERT_STRING_OF(name) #name
#define EMBERT_STRING(name) EMBERT_STRING_OF(name)

const Kernels kKernels = {EMBERT_STRING(EMBERT_ISA), kLanes, linear, int8_linear, normalize, embed, mean, attend};

}  // namespace embert::cpu::EMBERT_ISA
