// The gated delta rule: linear attention with a state for each request. See moeserve/ops/gated_delta.py for the
// formulas.

#pragma once

#include <cstdint>

#include "element_type.h"

namespace moeserve {

constexpr int kMaxTaps = 8;
constexpr int kMaxDeltaHead = 256;  // maximum size of a key, and of a value

// S chunks of T tokens in all. Rows of states are -1 for no state.
struct ChunkStates {
  const int32_t* row_starts;       // [S + 1]
  const int64_t* load;             // [S]: the state before the chunk; -1: zeros
  const int64_t* store;            // [S]: the state after it
  const int64_t* save;             // [S]: the state after its first `num_before_save` tokens
  const int64_t* num_before_save;  // [S], at least 1
  int64_t num_chunks;
};

// C channels, W taps.
struct ShortConvolution {
  ElementType type;    // of inputs and states: float32 or bfloat16
  const void* input;   // [T, C]
  int64_t row_stride;  // of the input
  const float* taps;   // [W, C]: the last multiplies the token itself
  void* states;        // [rows, W - 1, C]: the last inputs, the oldest first
  float* out;          // [T, C]: SiLU of the convolution
  int64_t num_channels;
  int num_taps;
  ChunkStates chunks;
};

// N value heads, G key heads, key size K, value size V.
struct GatedDelta {
  ElementType type;         // of rates, gates and outputs: float32 or bfloat16
  const float* mixed;       // [T, 2 * G * K + N * V]: queries, keys, values
  const void* gates;        // [T, N * V]
  int64_t gate_stride;      // from row to row
  const void* rates;        // [T, 2 * N]
  const float* log_decay;   // [N]
  const float* decay_bias;  // [N]
  const float* norm;        // [V]
  float* states;            // [rows, N, K, V]
  void* out;                // [T, N * V]
  int64_t num_heads;
  int64_t num_key_heads;
  int64_t key_dim;
  int64_t value_dim;
  float norm_epsilon;
  ChunkStates chunks;
};

// All arithmetic is float32. The bytes of a token's result depend only on its request's tokens up to it and on the
// shapes. No chunk may store or save to a row that another chunk stores to, saves to or loads.
void convolve(const ShortConvolution& convolution);
void gated_delta(const GatedDelta& delta);

}  // namespace moeserve
