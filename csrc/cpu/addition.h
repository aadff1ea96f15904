// Element-wise addition of two tensors.

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
};

void add_elements(const Addition& addition);

}  // namespace moeserve
