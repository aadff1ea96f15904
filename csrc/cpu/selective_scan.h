// The selective scan of Mamba-1, with a state for each request. See moeserve/ops/selective_scan for the formulas.

#pragma once

#include <cstdint>

#include "chunk_states.h"
#include "element_type.h"

namespace moeserve {

constexpr int64_t kMaxSelectiveState = 256;  // values of a channel's state

// T tokens, C channels, N values of a channel's state.
struct SelectiveScan {
  ElementType type;        // of gates and results: float32 or bfloat16
  const float* values;     // [T, C]
  const float* steps;      // [T, C]: step sizes before the softplus
  const float* inputs;     // [T, N]: factors of the values on their way into the state
  const float* outputs;    // [T, N]: factors of the state on its way out
  int64_t input_stride;    // from row to row
  int64_t output_stride;   // from row to row
  const void* gates;       // [T, C]
  int64_t gate_stride;     // from row to row
  const float* log_decay;  // [C, N]
  const float* skip;       // [C]
  float* states;           // [rows, C, N]
  void* out;               // [T, C]
  int64_t num_channels;
  int64_t state_size;
  ChunkStates chunks;
};

// All arithmetic is float32. The bytes of a token's result depend only on its request's tokens up to it and on N.
void selective_scan(const SelectiveScan& scan);

}  // namespace moeserve
