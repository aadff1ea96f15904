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
// The types of GGUF keep their codes and scales. Q8_0 has groups of 32 inputs, Q5_0 blocks of 32, and the others blocks
// of 32 to 256:
//
//   q8_0       for every 32 inputs: [8][32][4] bytes, [32] float16 scales: weight = (byte - 128) * scale
//   q4_k, q5_k for each block: [32] float16 factors of the scales, and of the minima, [groups / 2][32][2] minima,
//              [groups][32] scales, and the codes of each group of 32 inputs:
//              weight = scale * factor * code - minimum * factor of minima
//   q6_k       as q4_k without minima; scales for every 16 inputs: weight = scale * factor * (code - 32)
//   iq4_xs     as q4_k without minima: weight = scale * factor * value of the code
//   q5_0       as q5_k without minima, and with scales of 1: weight = factor * (code - 16)
//
// The codes of a group are [8][16][4] bytes as of int4 with their low 4 bits, then the bits above, if any, of 8 (q5_k,
// q5_0) or 4 (q6_k) consecutive steps in a byte: [bits][32][4] bytes.
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

enum class WeightFormat { kFloat32, kBFloat16, kInt8, kInt4, kMxfp4, kQ8_0, kQ4_K, kQ5_K, kQ6_K, kIQ4_XS, kQ5_0 };

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

constexpr int kQ8ScalesAt = kInputGroup * kPanel;
constexpr int kQ8GroupBytes = kQ8ScalesAt + kPanel * 2;

// The panel of a type with blocks. GGUF's blocks have 256 inputs. If chunks cut them, both parts have their factors.
struct BlockLayout {
  int high_bits;     // bits of a code above the low 4
  int scale_inputs;  // inputs that share a scale
  bool has_minima;

  constexpr int group_bytes() const { return kInputGroup * kPanel / 8 * (4 + high_bits); }
  constexpr int minima_at() const { return kPanel * (has_minima ? 4 : 2); }
  constexpr int scales_at(int groups) const { return minima_at() + (has_minima ? (groups + 1) / 2 * 2 * kPanel : 0); }
  constexpr int codes_at(int groups) const { return scales_at(groups) + groups * kInputGroup / scale_inputs * kPanel; }
  constexpr int block_bytes(int groups) const { return codes_at(groups) + groups * group_bytes(); }
};

constexpr int kMaxBlockInputs = 256;

constexpr bool has_blocks(WeightFormat format) { return format >= WeightFormat::kQ4_K; }

// Return the inputs of a block as files store it.
constexpr int64_t stored_inputs(WeightFormat format) {
  return has_blocks(format) && format != WeightFormat::kQ5_0 ? kMaxBlockInputs : kInputGroup;
}

constexpr BlockLayout block_layout(WeightFormat format) {
  if (format == WeightFormat::kQ6_K) return {2, 16, false};
  if (format == WeightFormat::kIQ4_XS) return {0, 32, false};
  if (format == WeightFormat::kQ5_0) return {1, 32, false};
  return {format == WeightFormat::kQ5_K ? 1 : 0, 32, true};
}

// The bits of a nonnegative float16, shifted to their place in a float32, give its value divided by this: 2^112.
constexpr float kFloat16Exponent = 5.192296858534828e33f;
constexpr int kByteOffset = 128;  // added to weights of int8, which are stored and multiplied as unsigned bytes

int64_t count_panels(int64_t num_outputs);

// The inputs that are stored together in a panel, such as a group with its scales, and their bytes.
struct PanelUnit {
  int64_t inputs;
  int64_t bytes;
};

// Return the unit of panels with chunks of `chunk_inputs`.
PanelUnit panel_unit(WeightFormat format, int64_t chunk_inputs);

// The inputs of a weight in chunks of `chunk_inputs`. The last chunk may have fewer.
struct InputChunks {
  int64_t num_inputs;
  int64_t chunk_inputs;

  int64_t count() const { return (num_inputs + chunk_inputs - 1) / chunk_inputs; }
  int64_t size(int64_t chunk) const { return std::min(chunk_inputs, num_inputs - chunk * chunk_inputs); }
};

// Return the number of inputs of a chunk, padded to whole units, and the bytes of its part of a panel, a multiple
// of 32.
int64_t padded_inputs(WeightFormat format, const InputChunks& chunks, int64_t chunk);
int64_t panel_bytes(WeightFormat format, const InputChunks& chunks, int64_t chunk);

// Return the same of all chunks.
int64_t padded_inputs(WeightFormat format, const InputChunks& chunks);
int64_t panel_bytes(WeightFormat format, const InputChunks& chunks);

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

// Rows of a weight in a type of GGUF, as files store them.
struct GgufRows {
  const uint8_t* blocks;
  int64_t stride;  // distance between rows in bytes
  int64_t count;
  int64_t first_input;  // inputs of the first block that are left out, a multiple of 32
};

// Return the bytes of a row whose blocks have these inputs.
int64_t gguf_row_bytes(WeightFormat format, int64_t num_inputs);

// Pack rows into whole panels. The units of the panels must begin at multiples of their size in the stored rows. Return
// false if a scale is not finite.
bool pack_gguf(WeightFormat format, const GgufRows& rows, const InputChunks& chunks, char* panels);

}  // namespace moeserve
