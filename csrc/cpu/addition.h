// The sum of two tensors. Plain arrays in and out; knows no Python.

#pragma once

#include <cstdint>

#include "element_type.h"

namespace moeserve {

struct Addition {
  ElementType type;  // float32 or bfloat16
  const void* a;
  const void* b;
  void* out;  // gets a + b, rounded once; may be either of them
  int64_t num_elements;
};

void add_elements(const Addition& addition);

}  // namespace moeserve
