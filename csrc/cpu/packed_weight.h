// Weights in the order in which the products read them. Knows no product.
//
// A weight [N, K] becomes panels of 32 outputs, one after the other. In a panel, inputs stand in the order of K, so
// that a product reads one stream of memory from its beginning to its end:
//
//   float32    [K][32]                 one input after the other
//   bfloat16   [K / 2][32][2]          two inputs of each output side by side, as VDPBF16PS wants them
//   int8       [K / 2][32][2], [32] float32 scales of the outputs: weight = value * scale
//   int4       for every 32 inputs: [8][16][2] words of four values, [32] bfloat16 scales: weight = value * scale.
//   Value
//              j of word (q, c, i) belongs to output 16 * (j % 2) + c and input 4 * q + 2 * (j / 2) + i
//
// What N and K lack to whole panels and whole groups of inputs is filled with zeros.

#pragma once

#include <cstdint>

#include "element_type.h"

namespace moeserve {

enum class WeightFormat { kFloat32, kBFloat16, kInt8, kInt4 };

constexpr int kPanel = 32;                              // outputs of a panel
constexpr int kInt4Group = 32;                          // inputs that share a scale
constexpr int kInt4ScalesAt = kInt4Group * kPanel / 2;  // bytes of values before a group's scales
constexpr int kInt4GroupBytes = kInt4ScalesAt + kPanel * 2;

// What a code stands for. Near zero, where most weights are, values lie closer together: these give the least squared
// error for normally distributed weights, found by alternating between choosing codes and scales and averaging what
// each code stands for (Lloyd's algorithm). All are exact in bfloat16.
constexpr int kInt4Values[16] = {-128, -104, -80, -62, -47, -34, -22, -10, 1, 13, 24, 37, 50, 65, 83, 105};

int64_t count_panels(int64_t num_outputs);

// Inputs, with those that are filled up.
int64_t padded_inputs(WeightFormat format, int64_t num_inputs);

// Bytes of one panel, a multiple of 64.
int64_t panel_bytes(WeightFormat format, int64_t num_inputs);

// Writes the panels of a weight [N, K], row after row in `source`, which is float32 or bfloat16 and may be the memory
// of the panels itself where the format keeps its type and N and K need no filling up. Runs on several threads.
void pack_weight(WeightFormat format, ElementType source_type, const void* source, int64_t num_outputs,
                 int64_t num_inputs, void* panels);

}  // namespace moeserve
