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

// Heads of T tokens that are scaled down to a length: out = y * min(1, limit / (|y| + 1e-6)), y = x * scale.
struct LengthLimit {
  ElementType type;  // of x and out
  const void* x;     // [T, N, H], heads contiguous
  int64_t token_stride;
  const float* scale;  // [N, H], or null
  void* out;           // [T, N, H]
  float limit;
  int64_t num_tokens;
  int64_t num_heads;
  int64_t head_size;
};

void limit_lengths(const LengthLimit& step);

constexpr int64_t kMaxSums = 128;
constexpr int64_t kMaxSumQueries = 3;

// Attention of Q queries to the sums that a token has, each divided by its root mean square (Inkling 2).
struct SumAttention {
  ElementType type;      // of sums, update and out
  void* sums;            // [T, *, D]: the first S are read
  int64_t token_stride;  // of the sums
  const void* update;    // [T, D] or null: added to the last sum, or becomes it
  const float* queries;  // [Q, D] or null: there is no result
  void* out;             // [T, Q, D]
  int64_t num_tokens;
  int64_t num_sums;  // S
  int64_t num_queries;
  int64_t width;
  bool begins;  // the update becomes the last sum
};

void attend_sums(const SumAttention& step);

// The bytes of a row depend only on the row, with all of them.

}  // namespace moeserve
