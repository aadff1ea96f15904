// Root-mean-square normalisation of rows, with an addition before it. Plain arrays in and out; knows no Python.

#pragma once

#include <cstdint>

#include "element_type.h"

namespace moeserve {

// Rows [tokens, heads, width]: the elements of a row lie side by side. Strides in elements.
struct HeadRows {
  void* data;
  int64_t token_stride;
  int64_t head_stride;
};

// T tokens, N heads of each, D elements of a head.
struct RmsNorm {
  ElementType type;  // of all tensors: float32 or bfloat16
  HeadRows x;
  HeadRows update;     // added to x before all else; data may be null
  const void* weight;  // [D]
  HeadRows sum;        // gets x + update, rounded to the type; unused without update
  HeadRows out;        // gets sum / sqrt(mean(sum²) + epsilon), rounded to the type, times weight
  int64_t num_tokens;
  int64_t num_heads;
  int64_t width;
  float epsilon;
};

// All arithmetic is float32. A row's bytes depend on its numbers and on the instruction set alone.
void rms_norm(const RmsNorm& norm);

}  // namespace moeserve
