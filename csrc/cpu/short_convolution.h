// A causal convolution over the last few tokens, separately for each channel. See
// moeserve/ops/convolution/interface.py.

#pragma once

#include <cstdint>

#include "chunk_states.h"
#include "element_type.h"

namespace moeserve {

constexpr int kMaxTaps = 16;

// C channels, W taps.
struct ShortConvolution {
  ElementType type;    // of inputs and states: float32 or bfloat16
  const void* input;   // [T, C]; gated: [T, 3 * C], gates of inputs, gates of outputs, values
  int64_t row_stride;  // of the input
  const float* taps;   // [W, C]: the last multiplies the token itself
  const float* bias;   // [C], or null
  // [T, G, W] in the type of the input, or null: added to the taps of the token and group; the first is its own tap
  const void* token_taps;
  void* states;        // [rows, W - 1, C]: the last inputs, oldest first
  void* out;           // [T, C]: SiLU of the convolution in float32; gated or linear: without SiLU, in the input's type
  const float* scale;  // [1], of linear outputs; null: they are not scaled
  int64_t num_channels;
  int64_t group_size;  // channels of a group of `token_taps`
  int num_taps;
  bool is_gated;
  bool is_linear;
  ChunkStates chunks;
};

// All arithmetic is float32, except that gated inputs are rounded to their type. The bytes of a token's result depend
// only on the tokens of its request up to that token.
void short_convolution(const ShortConvolution& convolution);

}  // namespace moeserve
