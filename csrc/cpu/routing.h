// The choice of experts for each token.

#pragma once

#include <cstdint>

#include "element_type.h"

namespace moeserve {

enum class Scoring { kSoftmax, kSigmoid, kSoftmaxOfChosen, kSigmoidOfChosen, kSqrtSoftplus, kSparseMixer };

// T tokens, D model width, E experts, K experts per token. RouterSpec in moeserve/ops/routing/interface.py documents
// the rules.
struct Routing {
  ElementType type;         // type of the hidden states: float32 or bfloat16
  const void* hidden;       // [T, D]
  int64_t hidden_stride;    // between rows, in elements
  const float* weight;      // [E, D]
  const float* bias;        // [E], or null
  const float* correction;  // [E], or null
  const float* factors;     // [E], of the weights at the end, or null
  const int64_t* given;     // [T, K]: experts that replace the choice, or null
  int64_t* experts;         // [T, K], best first, or as given
  float* weights;           // [T, K]
  int64_t num_tokens;
  int64_t width;
  int64_t num_experts;
  int64_t top_k;  // at most the number of eligible experts
  Scoring scoring;
  float tolerance;     // of the sparse mixer
  int64_t num_groups;  // divides E
  int64_t num_chosen_groups;
  int64_t experts_rating_group;  // 1, or 2 if a group has at least two
  bool is_normalized;
  float scale;
};

// All arithmetic is float32. Ties between experts or groups go to the lowest index, and NaN counts as the largest
// number. The bytes of a row depend only on its values, on the weights and on the instruction set.
//
// Throws std::invalid_argument for given experts out of range, before anything is written.
void route(const Routing& routing);

}  // namespace moeserve
