// The memory layout of packed weights: the order in which products read them.
//
// A weight [N, K] becomes panels of 32 outputs, one after the other. Inputs are in the order of K, so that a
// product reads a panel as one stream:
//
//   float32    [K][32]                 one input after the other
//   bfloat16   [K / 2][32][2]          two inputs of each output side by side, as for VDPBF16PS
//   int8       [K / 2][32][2], [32] float32 scales of the outputs: weight = value * scale
//   int4       for every 32 inputs: [8][16][2] words of four values, [32] bfloat16 scales: weight = value * scale;
//              value j of word (q, c, i) belongs to output 16 * (j % 2) + c and input 4 * q + 2 * (j / 2) + i
//
// N and K are filled up with zeros to whole panels and groups of inputs.

#pragma once

#include <cstdint>

#include "element_type.h"

namespace moeserve {

enum class WeightFormat { kFloat32, kBFloat16, kInt8, kInt4 };

constexpr int kPanel = 32;                              // outputs of a panel
constexpr int kInt4Group = 32;                          // inputs that share a scale
constexpr int kInt4ScalesAt = kInt4Group * kPanel / 2;  // bytes of values before a group's scales
constexpr int kInt4GroupBytes = kInt4ScalesAt + kPanel * 2;

// The values of the int4 codes. They are denser near zero, where most weights are: the values minimise the squared
// error for normally distributed weights, found by Lloyd's algorithm with alternating codes and scales. All are exact
// in bfloat16.
constexpr int kInt4Values[16] = {-128, -104, -80, -62, -47, -34, -22, -10, 1, 13, 24, 37, 50, 65, 83, 105};

int64_t count_panels(int64_t num_outputs);

// Return the number of inputs, filled up to whole groups.
int64_t padded_inputs(WeightFormat format, int64_t num_inputs);

// Return the bytes of one panel, a multiple of 64.
int64_t panel_bytes(WeightFormat format, int64_t num_inputs);

// Pack a row-major weight [N, K], float32 or bfloat16, into panels, on several threads. `source` may be the memory of
// the panels if the format keeps the type and N and K need no filling.
void pack_weight(WeightFormat format, ElementType source_type, const void* source, int64_t num_outputs,
                 int64_t num_inputs, void* panels);

}  // namespace moeserve
