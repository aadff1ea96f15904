// The largest number of each row, and where it stands. Plain arrays in and out; knows no Python.

#pragma once

#include <cstdint>

#include "element_type.h"

namespace moeserve {

struct RowMaximum {
  ElementType type;    // of the rows: float32 or bfloat16
  const void* rows;    // [R, width]
  int64_t row_stride;  // in elements
  int64_t num_rows;
  int64_t width;     // at least 1
  float* largest;    // [R]
  int64_t* indices;  // [R]
};

// Of equal numbers the first counts, and NaN is larger than any number.
void find_row_maximum(const RowMaximum& search);

}  // namespace moeserve
