// What the tensor copy engine (TMA) must know of a matrix, encoded by the driver and kept. sm_90 and later.
#pragma once

#include <cuda.h>

#include <map>
#include <tuple>

#include "../kernels/shapes.h"
#include "../status.h"

namespace embert {

// A row-major [rows, columns] matrix of a 16-bit type, cut into boxes of [box_rows, box_columns].
struct BoxedMatrix {
  const void* data;
  int rows, columns, box_rows, box_columns;  // box_columns: 64 or 32, whose rows of 128 or 64 bytes are swizzled
  // 0; or, of columns that are a multiple of 64, so many neighbouring boxes come with one copy, one after another: the
  // matrix is then mapped as [columns / 64, rows, 64].
  int boxes = 0;
};

class TensorMaps {
 public:
  explicit TensorMaps(DType dtype) : dtype_(dtype) {}
  Status open();

  // Encoding one costs as much as a launch, and a forward asks for the same ones in every layer: the last one of each
  // matrix is kept. `found` holds until the next call for the same matrix with another number of rows.
  Status get(const BoxedMatrix& matrix, const CUtensorMap*& found);

 private:
  struct Kept {
    int rows = -1;
    CUtensorMap map{};
  };

  DType dtype_;
  decltype(&cuTensorMapEncodeTiled) encode_ = nullptr;
  std::map<std::tuple<const void*, int, int, int, int>, Kept> kept_;
};

}  // namespace embert
