// Operations on rows of Zaya: weighted sums of two rows, GELU, and the mixing of projected and convolved heads.

#pragma once

#include <cstdint>

#include "element_type.h"

namespace moeserve {

constexpr int64_t kMaxMixedHead = 512;  // maximum size of a head

// (a + a_bias) * a_scale + (b + b_bias) * b_scale, in float32, for T rows of width D. All vectors are [D]; a null one
// changes nothing. Without b, its term is left out.
struct RowSum {
  ElementType type;  // of a, b and out
  const void* a;
  const void* b;
  const float* a_scale;
  const float* a_bias;
  const float* b_scale;
  const float* b_bias;
  void* out;
  int64_t num_rows;
  int64_t width;
};

void add_weighted(const RowSum& sum);

// out = x / 2 * (1 + erf(x / sqrt(2))).
struct Gelu {
  ElementType type;  // of x and out
  const void* x;
  void* out;
  int64_t num_elements;
};

void gelu(const Gelu& gelu);

// N query heads and G key heads of size H. Query head n belongs to key head g = n / (N / G).
//     queries[n] = normalised((query[n] + key[g]) / 2 + convolved[n])
//     keys[g]    = normalised(mean over the group's n of (query[n] + key[g]) / 2 + convolved[N + g]) * temperatures[g]
// Normalised heads have the length sqrt(H).
struct HeadMixing {
  ElementType type;       // of all but the temperatures
  const void* projected;  // [T, (N + G) * H]: queries, then keys
  int64_t row_stride;     // of `projected`
  const void* convolved;  // [T, N + G, H]
  const float* temperatures;
  void* out;  // [T, N + G, H]
  int64_t num_tokens;
  int64_t num_heads;
  int64_t num_key_heads;
  int64_t head_size;
};

void mix_heads(const HeadMixing& mixing);

// The bytes of a row depend only on the row, with all three.

}  // namespace moeserve
