// Tensor maps: descriptors of matrices for TMA (sm_90). The driver encodes them, and they are cached.
#pragma once

#include <cuda.h>

#include <map>
#include <tuple>

#include "common/status.h"
#include "common/types.h"

namespace embert {

// A row-major [rows, columns] matrix of a 16-bit type, or of bytes, divided into boxes of [box_rows, box_columns].
struct BoxedMatrix {
  const void* data;
  // box_columns: 64 or 32, whose rows of 128 or 64 bytes are swizzled; of bytes 128.
  int rows, columns, box_rows, box_columns;
  // Not 0: one copy loads this many adjacent boxes. The columns are then a multiple of 64, and the matrix is mapped as
  // [columns / 64, rows, 64].
  int boxes = 0;
};

constexpr int kByteColumns = 128;  // box_columns of a matrix of bytes

class TensorMaps {
 public:
  explicit TensorMaps(DType dtype) : dtype_(dtype) {}
  Status open();

  // Encoding a descriptor costs as much as a launch, and a forward pass needs the same ones in every layer. So the last
  // one of each matrix is cached. `descriptor` stays valid until the next call for that matrix with another number of
  // rows.
  Status get(const BoxedMatrix& matrix, const CUtensorMap*& descriptor);

 private:
  struct Cached {
    int rows = -1;
    CUtensorMap map{};
  };

  DType dtype_;
  decltype(&cuTensorMapEncodeTiled) encode_ = nullptr;
  std::map<std::tuple<const void*, int, int, int, int>, Cached> cache_;
};

}  // namespace embert
