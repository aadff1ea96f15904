// The maximum of each row and its index.

#pragma once

#include <cstdint>

#include "element_type.h"

namespace moeserve {

struct RowMaximum {
  ElementType type;    // type of the rows: float32 or bfloat16
  const void* rows;    // [R, width]
  int64_t row_stride;  // in elements
  int64_t num_rows;
  int64_t width;     // at least 1
  float* largest;    // [R]
  int64_t* indices;  // [R]
};

// Ties go to the lowest index, and NaN counts as larger than any number.
void find_row_maximum(const RowMaximum& maximum);

}  // namespace moeserve
