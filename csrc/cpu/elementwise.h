// Addition of two tensors, with or without a factor, and gating: rows times the sigmoid or softplus of a gate per row
// or element.

#pragma once

#include <cstdint>

#include "element_type.h"

namespace moeserve {

struct Addition {
  ElementType type;  // float32 or bfloat16
  const void* a;
  const void* b;
  void* out;  // result a + b, rounded once; may be a or b
  int64_t num_elements;
  const float* factor;  // multiplies the rounded sums, which are rounded once more; null: none
};

void add_elements(const Addition& addition);

// T rows of width D.
struct Gating {
  ElementType type;   // type of all tensors: float32 or bfloat16
  const void* gates;  // [T, 1] or [T, D]
  const void* rows;   // [T, D]
  void* out;          // [T, D]: f(gate) * row; may be `rows`
  int64_t num_rows;
  int64_t width;
  int64_t gate_stride;  // from row to row
  bool has_gate_for_each;
  bool is_softplus;  // f; false: the sigmoid
};

// f(gate) is rounded to the element type, and so is the product. The bytes of a row depend only on the row and its
// gate.
void gate_rows(const Gating& gating);

}  // namespace moeserve
