// The launchers of the elementwise kernels. Each checks what the host can check, launches on a stream and returns at
// once.
#pragma once

#include <cstddef>

#include "device/dtype.h"
#include "device/launch.h"
#include "elementwise/activation.h"

namespace embert {

// x[rows, columns] = activation(x), in place.
Status activate_rows(DType dtype, Activation activation, int rows, int columns, void* x, const Stream& stream);

// y[count] = x[count], between storage types.
Status convert(DType from, const void* x, DType to, void* y, size_t count, const Stream& stream);

}  // namespace embert
