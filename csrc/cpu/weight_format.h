// The formats of packed weights: the table of their properties, and their memory layout, which is the order in which
// products read them.
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
// The types of GGUF keep their codes and scales. Q8_0 has groups of 32 inputs, types with 0, 1 or NL at the end blocks
// of 32, the others blocks of 32 to 256:
//
//   q8_0       for every 32 inputs: [8][32][4] bytes, [32] float16 scales: weight = (byte - 128) * scale
//   q4_k, q5_k for each block: [32] float16 factors of the scales, and of the minima, [groups / 2][32][2] minima,
//              [groups][32] scales, and the codes of each group of 32 inputs:
//              weight = scale * factor * code - minimum * factor of minima
//   q6_k       as q4_k without minima; scales for every 16 inputs: weight = scale * factor * (code - 32)
//   iq4_xs     as q4_k without minima: weight = scale * factor * value of the code
//   q5_0       as q5_k without minima, and with scales of 1: weight = factor * (code - 16)
//   q4_0       as q4_k without minima, and with scales of 1: weight = factor * (code - 8)
//   iq4_nl     as iq4_xs with scales of 1: weight = factor * value of the code
//   q5_1, q4_1 as q5_k and q4_k with scales and minima of 1: weight = factor * code - factor of minima
//
// The codes of a group are [8][16][4] bytes as of int4 with their low 4 bits, then the bits above, if any, of 8 (q5_k,
// q5_0) or 4 (q6_k) consecutive steps in a byte: [bits][32][4] bytes.
//
//   fp8        for every 128 inputs: [32] float32 scales of the outputs, and [32][8][2][4][2] bytes of E4M3 codes: for
//              every 4 inputs and every 4 outputs, the first two inputs of each output, then the other two:
//              weight = value of the code * scale, rounded to bfloat16. kFloat8MarkAt marks equal scales
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

constexpr int kPanel = 32;       // outputs of a panel
constexpr int kInputGroup = 32;  // quantised inputs that are multiplied together; with int4 they share a scale

// The inputs of a weight in chunks of `chunk_inputs`. The last chunk may have fewer.
struct InputChunks {
  int64_t num_inputs;
  int64_t chunk_inputs;

  int64_t count() const { return (num_inputs + chunk_inputs - 1) / chunk_inputs; }
  int64_t size(int64_t chunk) const { return std::min(chunk_inputs, num_inputs - chunk * chunk_inputs); }
};

// The panel of a type with blocks. GGUF's blocks have 256 inputs. If chunks cut them, both parts have their factors.
struct BlockLayout {
  int high_bits = 0;     // bits of a code above the low 4
  int scale_inputs = 0;  // inputs that share a scale; 0: the format has no blocks
  bool has_minima = false;

  constexpr int group_bytes() const { return kInputGroup * kPanel / 8 * (4 + high_bits); }
  constexpr int minima_at() const { return kPanel * (has_minima ? 4 : 2); }
  constexpr int scales_at(int groups) const { return minima_at() + (has_minima ? (groups + 1) / 2 * 2 * kPanel : 0); }
  constexpr int codes_at(int groups) const { return scales_at(groups) + groups * kInputGroup / scale_inputs * kPanel; }
  constexpr int block_bytes(int groups) const { return codes_at(groups) + groups * group_bytes(); }
};

constexpr int kMaxBlockInputs = 256;

// A block of a row as files store it, and where a type of GGUF has its parts in a block.
struct StoredBlock {
  int inputs = 0;  // 0: weights are packed from numbers, not from stored codes
  int num_bytes = 0;
  int low_at = 0;   // the low 4 bits of codes
  int high_at = 0;  // the bits above
  int scales_at = 0;
  int factors_at = 0;  // float16: of scales, then of minima
};

// Rows of a weight as files store them.
struct StoredRows {
  const uint8_t* blocks;
  int64_t stride;  // distance between rows in bytes
  int64_t count;
  int64_t first_input;  // inputs of the first block that are left out
  const char* scales;   // [count, units of inputs] in the type that `kFormats` lists, or null
};

enum class WeightFormat {
  kFloat32,
  kBFloat16,
  kInt8,
  kInt4,
  kMxfp4,
  kQ8_0,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kIQ4_XS,
  kQ5_0,
  kQ4_0,
  kIQ4_NL,
  kQ5_1,
  kQ4_1,
  kFp8
};

// The rows that are multiplied with weights: as they are, in the type of the weights, or quantised to 8 bits.
enum class RowForm { kFloat32, kBFloat16, kQuantized };

// Packs stored rows into whole panels. Returns false if a scale or a code is not finite. Units of the panels must begin
// at multiples of their size in the stored rows.
using PackStored = bool (*)(WeightFormat format, const StoredRows& rows, const InputChunks& chunks, char* panels);

bool pack_mxfp4(WeightFormat format, const StoredRows& rows, const InputChunks& chunks, char* panels);
bool pack_gguf(WeightFormat format, const StoredRows& rows, const InputChunks& chunks, char* panels);
bool pack_float8(WeightFormat format, const StoredRows& rows, const InputChunks& chunks, char* panels);

struct FormatTraits {
  const char* name;
  RowForm rows;
  int unit_inputs;      // inputs that are stored together in a panel, such as a group with its scales
  int input_bytes = 0;  // bytes of a panel for each input; of formats with blocks, `blocks` has the sizes
  int unit_bytes = 0;   // bytes of scales for each unit
  int end_bytes = 0;    // bytes at the end of a panel: float32 scales of the outputs
  BlockLayout blocks{};
  StoredBlock stored{};
  PackStored pack_stored = nullptr;
  ElementType scale_type = ElementType::kOther;  // of scales that are stored beside the codes, one for each unit

  constexpr bool has_blocks() const { return blocks.scale_inputs > 0; }
  constexpr bool is_stored() const { return stored.inputs > 0; }
};

// All formats, in the order of WeightFormat.
constexpr FormatTraits kFormats[] = {
    {"float32", RowForm::kFloat32, 1, 4 * kPanel},
    {"bfloat16", RowForm::kBFloat16, 2, 2 * kPanel},
    {"int8", RowForm::kQuantized, kInputGroup, kPanel, 0, 4 * kPanel},
    {"int4", RowForm::kQuantized, kInputGroup, kPanel / 2, 3 * kPanel},
    {"mxfp4", RowForm::kQuantized, 32, kPanel / 2, kPanel, 0, {}, {32, 16}, pack_mxfp4, ElementType::kUInt8},
    {"q8_0", RowForm::kQuantized, 32, kPanel, 2 * kPanel, 0, {}, {32, 34, 2, 0, 0, 0}, pack_gguf},
    {"q4_k", RowForm::kQuantized, 256, 0, 0, 0, {0, 32, true}, {256, 144, 16, 0, 4, 0}, pack_gguf},
    {"q5_k", RowForm::kQuantized, 256, 0, 0, 0, {1, 32, true}, {256, 176, 48, 16, 4, 0}, pack_gguf},
    {"q6_k", RowForm::kQuantized, 256, 0, 0, 0, {2, 16, false}, {256, 210, 0, 128, 192, 208}, pack_gguf},
    {"iq4_xs", RowForm::kQuantized, 256, 0, 0, 0, {0, 32, false}, {256, 136, 8, 0, 2, 0}, pack_gguf},
    {"q5_0", RowForm::kQuantized, 32, 0, 0, 0, {1, 32, false}, {32, 22, 6, 2, 0, 0}, pack_gguf},
    {"q4_0", RowForm::kQuantized, 32, 0, 0, 0, {0, 32, false}, {32, 18, 2, 0, 0, 0}, pack_gguf},
    {"iq4_nl", RowForm::kQuantized, 32, 0, 0, 0, {0, 32, false}, {32, 18, 2, 0, 0, 0}, pack_gguf},
    {"q5_1", RowForm::kQuantized, 32, 0, 0, 0, {1, 32, true}, {32, 24, 8, 4, 0, 0}, pack_gguf},
    {"q4_1", RowForm::kQuantized, 32, 0, 0, 0, {0, 32, true}, {32, 20, 4, 0, 0, 0}, pack_gguf},
    {"fp8", RowForm::kBFloat16, 128, kPanel, 4 * kPanel, 0, {}, {1, 1}, pack_float8, ElementType::kFloat32},
};
constexpr int kNumFormats = sizeof(kFormats) / sizeof(kFormats[0]);

constexpr const FormatTraits& traits_of(WeightFormat format) { return kFormats[static_cast<int>(format)]; }

constexpr bool is_quantized(WeightFormat format) { return traits_of(format).rows == RowForm::kQuantized; }

// Return true if weights can be quantised to this format with blocks.
constexpr bool can_quantize(WeightFormat format) {
  return format == WeightFormat::kQ4_K || format == WeightFormat::kQ5_K || format == WeightFormat::kQ6_K;
}

// Return the bytes of a stored row whose blocks have these inputs.
constexpr int64_t stored_row_bytes(WeightFormat format, int64_t num_inputs) {
  const StoredBlock& block = traits_of(format).stored;
  return (num_inputs + block.inputs - 1) / block.inputs * block.num_bytes;
}

inline int64_t count_panels(int64_t num_outputs) { return (num_outputs + kPanel - 1) / kPanel; }

// The inputs that are stored together in a panel, such as a group with its scales, and their bytes.
struct PanelUnit {
  int64_t inputs;
  int64_t bytes;
};

// Return the unit of panels with chunks of `chunk_inputs`. Chunks cut the units of stored formats.
PanelUnit panel_unit(WeightFormat format, int64_t chunk_inputs);

// Return the number of inputs of a chunk, padded to whole units, and the bytes of its part of a panel, a multiple
// of 32.
int64_t padded_inputs(WeightFormat format, const InputChunks& chunks, int64_t chunk);
int64_t panel_bytes(WeightFormat format, const InputChunks& chunks, int64_t chunk);

// Return the same of all chunks.
int64_t padded_inputs(WeightFormat format, const InputChunks& chunks);
int64_t panel_bytes(WeightFormat format, const InputChunks& chunks);

// The places of the parts of groups and panels, and the numbers that bytes stand for.
constexpr int kInt4ScalesAt = kInputGroup * kPanel / 2;  // bytes of codes before a group's scales
constexpr int kInt4ZerosAt = kInt4ScalesAt + kPanel * 2;
constexpr int kInt4GroupBytes = kInt4ZerosAt + kPanel;

// Zero points have steps of 1/8, from -8 to 23.9. They include the integers of published formats, and numbers between
// codes, which fit groups of weights better.
constexpr int kInt4ZeroOffset = 64;
constexpr float kInt4ZeroStep = 0.125f;
constexpr float kInt4HighestCode = 15;

constexpr int kMxfp4GroupBytes = kInt4ScalesAt + kPanel;

constexpr int kFloat8CodesAt = 4 * kPanel;

constexpr int kQ8ScalesAt = kInputGroup * kPanel;
constexpr int kQ8GroupBytes = kQ8ScalesAt + kPanel * 2;

// The bits of a nonnegative float16, shifted to their place in a float32, give its value divided by this: 2^112.
constexpr float kFloat16Exponent = 5.192296858534828e33f;
constexpr int kByteOffset = 128;  // added to weights of int8, which are stored and multiplied as unsigned bytes

}  // namespace moeserve
