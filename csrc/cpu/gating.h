// Rows times the sigmoid of a number of their own. Plain arrays in and out; knows no Python.

#pragma once

#include <cstdint>

#include "element_type.h"

namespace moeserve {

// T rows, D width.
struct Gating {
  ElementType type;   // of all: float32 or bfloat16
  const void* gates;  // [T]
  const void* rows;   // [T, D]
  void* out;          // [T, D], gets sigmoid(gate) * row; may be the rows
  int64_t num_rows;
  int64_t width;
};

// The sigmoid is rounded to the element type, and the product once more. A row's bytes depend on it and its gate alone.
void gate_rows(const Gating& gating);

}  // namespace moeserve
