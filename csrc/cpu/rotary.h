// Rotary position embedding.

#pragma once

#include <cstdint>

#include "element_type.h"

namespace moeserve {

// T tokens with N heads each, H elements per head, F rotated pairs per head.
struct RotaryEmbedding {
  ElementType type;  // type of the heads: float32 or bfloat16
  HeadRows source;
  HeadRows target;       // the heads with their first 2 * F elements rotated; may be `source`
  const float* cosines;  // [T, F]
  const float* sines;
  int64_t num_tokens;
  int64_t num_heads;
  int64_t head_size;
  int64_t num_pairs;
  bool is_interleaved;  // pair f is (2 f, 2 f + 1); otherwise it is (f, f + F)
};

// Each pair (a, b) becomes (a cos - b sin, b cos + a sin), computed in float32 and rounded once.
void apply_rope(const RotaryEmbedding& rotary);

}  // namespace moeserve
