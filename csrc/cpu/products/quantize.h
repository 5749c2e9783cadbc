// Rows in int8: engine/quantization/rows.py defines them, and the integers are the same to the bit.
#pragma once

#include <cstdint>

namespace embert::cpu {

constexpr int kRotated = 128;  // columns that are rotated together
constexpr int kZero = 128;     // the unsigned value of 0

// A row x [columns], a multiple of 128, → q + 128, and the row's scale: x · H / √128 is about q · scale.
//
// `rotated` [columns] is scratch for the rotated row. The scale of a row with NaN is NaN.
void quantize(const float* x, int columns, float* rotated, std::uint8_t* integers, float* scale);

}  // namespace embert::cpu
