// RMSNorm of rows, with an optional addition before it.

#pragma once

#include <cstdint>

#include "element_type.h"

namespace moeserve {

// T tokens with N heads each, D elements per head.
struct RmsNorm {
  ElementType type;  // type of all tensors: float32 or bfloat16
  HeadRows x;
  HeadRows update;     // added to x first; data may be null
  const void* weight;  // [D]
  HeadRows sum;        // x + update, rounded to the type; unused without update
  HeadRows out;        // sum / sqrt(mean(sum²) + epsilon), rounded to the type, times weight
  int64_t num_tokens;
  int64_t num_heads;
  int64_t width;
  float epsilon;
};

// All arithmetic is float32. The bytes of a row depend only on its values and on the instruction set.
void rms_norm(const RmsNorm& norm);

}  // namespace moeserve
