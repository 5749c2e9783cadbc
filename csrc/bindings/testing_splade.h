// The SPLADE head's part of _cuda_testing: its single kernels, and the whole head.
#pragma once

#include "bindings/bench.h"

namespace embert {

void bind_splade(nanobind::module_& module, nanobind::class_<Bench>& bench);

}  // namespace embert
