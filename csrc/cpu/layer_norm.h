// LayerNorm of rows.

#pragma once

#include <cstdint>

#include "element_type.h"

namespace moeserve {

// T tokens, D elements per row.
struct LayerNorm {
  ElementType type;    // of rows, weight and bias: float32 or bfloat16
  const void* rows;    // [T, D], rows contiguous
  const void* weight;  // [D]
  const void* bias;    // [D]
  void* out;           // [T, D], rows contiguous: (x - mean) / sqrt(variance + epsilon) * weight + bias; may be `rows`
  int64_t row_stride;  // in elements
  int64_t out_stride;
  int64_t num_rows;
  int64_t width;
  float epsilon;
};

// All arithmetic is float32, rounded once. The bytes of a row depend only on its values and on the instruction set.
void layer_norm(const LayerNorm& norm);

}  // namespace moeserve
