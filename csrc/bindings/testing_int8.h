// The int8 part of _cuda_testing: quantized rows and GEMMs.
#pragma once

#include "bindings/bench.h"

namespace embert {

void bind_int8(nanobind::module_& m, nanobind::class_<Bench>& bench);

}  // namespace embert
