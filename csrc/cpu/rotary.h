// Rotary position embedding. Plain arrays in and out; knows no Python.

#pragma once

#include <cstdint>

#include "element_type.h"

namespace moeserve {

// Heads [T, N, H], whose elements lie side by side. Strides in elements.
struct Heads {
  void* data;
  int64_t token_stride;
  int64_t head_stride;
};

// T tokens, N heads of each, H elements of a head, F pairs of them that turn.
struct RotaryTurn {
  ElementType type;  // of the heads: float32 or bfloat16
  Heads source;
  Heads target;          // gets the heads with their first 2 * F elements turned; may be the source
  const float* cosines;  // [T, F]
  const float* sines;
  int64_t num_tokens;
  int64_t num_heads;
  int64_t head_size;
  int64_t num_pairs;
  bool is_interleaved;  // pair f is (2 f, 2 f + 1); otherwise it is (f, f + F)
};

// (a, b) becomes (a cos - b sin, b cos + a sin), computed in float32 and rounded once.
void turn_heads(const RotaryTurn& turn);

}  // namespace moeserve
