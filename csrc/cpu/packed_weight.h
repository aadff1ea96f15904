// The memory layout of packed weights: the order in which products read them.
//
// A weight [N, K] becomes panels of 32 outputs, one after another. Inputs are in the order of K, so that a product
// reads a panel as one stream:
//
//   float32    [K][32]                 one input after the other
//   bfloat16   [K / 2][32][2]          two inputs of each output side by side, as for VDPBF16PS
//   int8       [K / 4][32][4] bytes, [32] float32 scales of the outputs: weight = (byte - 128) * scale
//   int4       for every 32 inputs: [8][16][4] bytes, [32] float16 scales, [32] bytes of zero points:
//              weight = (code - (zero - 64) / 8) * scale;
//              byte (q, c, i) has the codes of input 4 * q + i, for output c in its low half, 16 + c in its high half
//   mxfp4      for every 32 inputs: [8][16][4] bytes of E2M1 codes as of int4, [32] bytes of E8M0 scales:
//              weight = value of the code * 2^(byte - 127)
//
// N and K are padded with zeros to whole panels and groups of inputs.
//
// The inputs may be divided into chunks of one size, of which the last may be smaller. Each chunk of a panel is packed
// like a panel of a separate weight, and follows the previous chunk.

#pragma once

#include <algorithm>
#include <cstdint>

#include "element_type.h"

namespace moeserve {

enum class WeightFormat { kFloat32, kBFloat16, kInt8, kInt4, kMxfp4 };

constexpr int kPanel = 32;       // outputs of a panel
constexpr int kInputGroup = 32;  // quantised inputs that are multiplied together; with int4 they share a scale
constexpr int kInt4ScalesAt = kInputGroup * kPanel / 2;  // bytes of codes before a group's scales
constexpr int kInt4ZerosAt = kInt4ScalesAt + kPanel * 2;
constexpr int kInt4GroupBytes = kInt4ZerosAt + kPanel;

// Zero points have steps of 1/8, from -8 to 23.9. They include the integers of published formats, and numbers between
// codes, which fit groups of weights better.
constexpr int kInt4ZeroOffset = 64;
constexpr float kInt4ZeroStep = 0.125f;
constexpr float kInt4HighestCode = 15;

constexpr int kMxfp4GroupBytes = kInt4ScalesAt + kPanel;

// The bits of a nonnegative float16, shifted to their place in a float32, give its value divided by this: 2^112.
constexpr float kFloat16Exponent = 5.192296858534828e33f;
constexpr int kByteOffset = 128;  // added to weights of int8, which are stored and multiplied as unsigned bytes

int64_t count_panels(int64_t num_outputs);

// Return the number of inputs, padded to whole groups.
int64_t padded_inputs(WeightFormat format, int64_t num_inputs);

// Return the bytes of one panel of a single chunk, a multiple of 32.
int64_t panel_bytes(WeightFormat format, int64_t num_inputs);

// The inputs of a weight in chunks of `chunk_inputs`. The last chunk may have fewer.
struct InputChunks {
  int64_t num_inputs;
  int64_t chunk_inputs;

  int64_t count() const { return (num_inputs + chunk_inputs - 1) / chunk_inputs; }
  int64_t size(int64_t chunk) const { return std::min(chunk_inputs, num_inputs - chunk * chunk_inputs); }
};

// Return the bytes of one panel with all its chunks.
int64_t panel_bytes(WeightFormat format, const InputChunks& chunks);
int64_t padded_inputs(WeightFormat format, const InputChunks& chunks);

// Pack a row-major weight [N, K], float32 or bfloat16, into panels, on several threads. `source` may be the memory of
// the panels if the format keeps the type, and neither N nor the chunks of K need padding.
//
// `int4_scales`, which may be null, are the bits of nonnegative float16 scales [N, groups of 32 inputs]. Weights near
// integer multiples of these scales, where the integers of a group span fewer than 16, become exactly those multiples.
// Chunks must then consist of whole groups.
void pack_weight(WeightFormat format, ElementType source_type, const void* source, const uint16_t* int4_scales,
                 int64_t num_outputs, InputChunks chunks, void* panels);

// Pack a weight [N, K] in MXFP4 as checkpoints store it, with K a multiple of 32, into panels: `codes` [N, K / 2] with
// the first of two inputs in the low half of a byte, and `scales` [N, K / 32].
void pack_mxfp4(const uint8_t* codes, const uint8_t* scales, int64_t num_outputs, int64_t num_inputs, char* panels);

}  // namespace moeserve
