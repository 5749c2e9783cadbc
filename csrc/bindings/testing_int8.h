// What _cuda_testing has of rows and products in 8 bits.
#pragma once

#include "bindings/bench.h"

namespace embert {

void bind_int8(nanobind::module_& m, nanobind::class_<Bench>& bench);

}  // namespace embert
