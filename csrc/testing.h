// embert.engine._cuda.testing: single launches for tests/csrc and benchmarks/kernels.
#pragma once

#include <nanobind/nanobind.h>

#include "status.h"

namespace embert {

void bind_testing(nanobind::module_& m, void (*raise)(const Status&));

}  // namespace embert
