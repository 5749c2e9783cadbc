// maxima[text, column]: the largest of max(0, x·Wᵀ + bias) over a text's rows. x·Wᵀ, all rows by all columns, is never
// in memory as a whole (EPILOGUES.md).
//
// Our own Hopper kernel takes the maxima in its epilogue. The portable implementation writes the products of some rows,
// and a second kernel reduces them. NaN counts as the largest number, so that it is visible.
#pragma once

#include <memory>

#include "common/dtype.h"
#include "common/launch.h"

namespace embert {

struct LinearWeights;
class GemmProvider;

// Maxima have a row for each text, of whole tiles of columns. Values past the last column are undefined.
constexpr int kMaximaColumns = 128;
inline int maxima_pitch(int columns) {
  return (columns + kMaximaColumns - 1) / kMaximaColumns * kMaximaColumns;
}

// The entry of a row that belongs to no text.
constexpr int kNoText = -1;

// Consecutive texts of a batch, and their rows of x.
struct TextRows {
  const void* x;       // [all_rows, in], of which these texts have `rows` from `first_row` on
  const int* text_of;  // [all_rows], device memory: each row's text, in ascending order without gaps; or kNoText
  int all_rows, first_row, rows;
  int first_text;
};

class TextMaxima {
 public:
  virtual ~TextMaxima() = default;
  // Raises `maxima`, [texts, maxima_pitch(out)], which begins with the first text and must be 0 initially.
  virtual Status run(const TextRows& texts, float* maxima, const Stream& stream) = 0;
  virtual size_t workspace_bytes() const { return 0; }
};

// For every provider, by GEMMs of some rows at a time.
Status make_portable_maxima(GemmProvider& gemm, DType dtype, const LinearWeights& weights, const Stream& stream,
                            std::unique_ptr<TextMaxima>& maxima_gemm);

}  // namespace embert
