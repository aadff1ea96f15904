// Rotary position embedding, in place. Plain arrays in and out; knows no Python.

#pragma once

#include <cstdint>

#include "element_type.h"

namespace moeserve {

// T tokens, N heads of each, F pairs of numbers that turn.
struct RotaryTurn {
  ElementType type;      // of the heads: float32 or bfloat16
  void* heads;           // [T, N, at least 2 * F]: the first 2 * F of a head turn, and the others are left alone
  int64_t token_stride;  // in elements
  int64_t head_stride;
  const float* cosines;  // [T, F]
  const float* sines;
  int64_t num_tokens;
  int64_t num_heads;
  int64_t num_pairs;
  bool is_interleaved;  // pair f is (2 f, 2 f + 1); otherwise it is (f, f + F)
};

// (a, b) becomes (a cos - b sin, b cos + a sin), computed in float32 and rounded once.
void turn_heads(const RotaryTurn& turn);

}  // namespace moeserve
