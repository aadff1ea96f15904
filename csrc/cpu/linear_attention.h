// Linear attention with a state for each request. See moeserve/ops/linear_attention/interface.py for the formulas.

#pragma once

#include <cstdint>

#include "chunk_states.h"
#include "element_type.h"

namespace moeserve {

constexpr int kMaxLinearHead = 256;  // maximum size of a key, and of a value

// N value heads, G key heads, key size K, value size V.
struct LinearAttention {
  ElementType type;         // of decays, rates, gates and `out`: float32 or bfloat16
  const float* mixed;       // [T, 2 * G * K + N * V]: queries, keys, values
  const void* gates;        // [T, N * V]; null: outputs are neither normalised nor gated
  int64_t gate_stride;      // from row to row
  const void* decays;       // [T, N]; of each channel: [T, N * K]; null: exp(-exp(log_decay)) for all tokens
  int64_t decay_stride;     // from row to row
  const void* rates;        // [T, N]: of the delta rule; null: there is no delta rule
  int64_t rate_stride;      // from row to row
  const float* log_decay;   // [N]
  const float* decay_bias;  // [N]; of each channel: [N * K]
  const float* skip;        // [N]: factors of values in the outputs; null: none
  const float* norm;        // [V], the same for all heads, or [N * V]
  float* states;            // [rows, N, K, V]
  float* outputs;           // [T, N * V]: memory for outputs before the norm
  void* out;                // [T, N * V]
  int64_t num_heads;
  int64_t num_key_heads;
  int64_t key_dim;
  int64_t value_dim;
  int64_t norm_heads;  // heads that are normalised together
  float norm_epsilon;
  float decay_floor;  // of the logarithms of decays, negative; 0: none
  bool has_channel_decays;
  bool has_norm_of_each;    // `norm` has a weight for each value of each head
  bool gates_with_sigmoid;  // otherwise with SiLU
  bool gates_before_norm;
  ChunkStates chunks;
};

// All arithmetic is float32. The bytes of a token's result depend only on its request's tokens up to it and on the
// shapes.
void linear_attention(const LinearAttention& attention);

}  // namespace moeserve
