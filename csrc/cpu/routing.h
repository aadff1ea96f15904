// The choice of each token's experts. Plain arrays in and out; knows no Python.

#pragma once

#include <cstdint>

#include "element_type.h"

namespace moeserve {

enum class Scoring { kSoftmax, kSigmoid, kSoftmaxOfChosen };

// T tokens, D model width, E experts, K experts per token. What the rules mean is told where Python has them.
struct Routing {
  ElementType type;         // of the hidden states: float32 or bfloat16
  const void* hidden;       // [T, D]
  int64_t hidden_stride;    // from row to row, in elements
  const float* weight;      // [E, D]
  const float* bias;        // [E], or null
  const float* correction;  // [E], or null
  int64_t* experts;         // [T, K], gets the best first
  float* weights;           // [T, K]
  int64_t num_tokens;
  int64_t width;
  int64_t num_experts;
  int64_t top_k;  // of the experts that can be chosen, there are at least so many
  Scoring scoring;
  int64_t num_groups;  // divides E
  int64_t num_chosen_groups;
  int64_t experts_rating_group;  // 1, or 2 where a group has as many
  bool is_normalized;
  float scale;
};

// All arithmetic is float32. Of equal experts, and of equal groups, the lowest index comes first; NaN counts as the
// largest number. A row's bytes depend on its numbers, on the weights and on the instruction set alone.
void route(const Routing& routing);

}  // namespace moeserve
