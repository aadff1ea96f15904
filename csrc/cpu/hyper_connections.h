// Residual streams around a network. See moeserve/ops/streams/interface.py.

#pragma once

#include <cstdint>

#include "element_type.h"

namespace moeserve {

constexpr int kMaxStreams = 8;

// T tokens, S streams of width D, X = S * D; C coefficients: S, S * 2 without a matrix, or S * (2 + S).
struct StreamCollapse {
  ElementType type;     // of the streams and of the result: float32 or bfloat16
  const void* streams;  // [T, X]
  const float* map;     // [C, X]
  const float* base;    // [C]
  const float* scales;  // [1], [2] or [3]
  float* coefficients;  // [T, C]
  void* out;            // [T, D]
  int64_t num_tokens;
  int64_t num_streams;
  int64_t num_coefficients;
  int64_t width;  // D
  int64_t num_iterations;
  float epsilon;
  float norm_epsilon;
  float output_factor;  // of the sigmoids that are the weights of the output
  float output_epsilon;
};

struct StreamExpansion {
  ElementType type;           // of streams, update and result
  const void* streams;        // [T, X]
  const void* update;         // [T, D]
  const float* coefficients;  // [T, C]
  void* out;                  // [T, X]
  int64_t num_tokens;
  int64_t num_streams;
  int64_t num_coefficients;
  int64_t width;
};

// All arithmetic is float32. The bytes of a row depend on its values, the weights and the instruction set alone.
void collapse_streams(const StreamCollapse& step);
void expand_streams(const StreamExpansion& step);

}  // namespace moeserve
