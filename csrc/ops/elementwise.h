// The launchers of the elementwise kernels. Each checks its arguments, launches on a stream and returns immediately.
#pragma once

#include <cstddef>

#include "common/dtype.h"
#include "common/launch.h"
#include "ops/activation.h"
#include "ops/rope.h"

namespace embert {

// x[rows, columns] = activation(x), in place.
Status activate_rows(DType dtype, Activation activation, int rows, int columns, void* x, const Stream& stream);

// y[rows, columns] = activation(gate)·value, of x[rows, 2·columns]: gate, value, gate, value, …
Status gate_rows(DType dtype, Activation activation, const void* x, int rows, int columns, void* y,
                 const Stream& stream);

// Applies RoPE to queries and keys of x[rows, pitch], in place.
Status rope_rows(DType dtype, void* x, int rows, int pitch, const RopeColumns& rope, const Stream& stream);

// y[count] = x[count], between storage types.
Status convert(DType from, const void* x, DType to, void* y, size_t count, const Stream& stream);

}  // namespace embert
