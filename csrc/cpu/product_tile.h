// The inner loops of products: a few rows times the 64 outputs of two panels, for vectors of any width.
//
// A tile adds to its sums input by input in the order of K, which alone determines the sum of an output.

#pragma once

#include <cstdint>

#include "lanes.h"
#include "packed_weight.h"

namespace moeserve {

constexpr int kTileOutputs = 2 * kPanel;

// Some inputs of two panels. With `scales`, one for each of the 64 outputs, the products of these inputs are summed
// separately, and their sum times the scale is added.
struct Block {
  const char* panels[2];
  const float* scales;
  int64_t num_inputs;
  bool is_first;  // overwrite the sums instead of adding to them
};

template <int W, int kRows, int kVectors>
MOESERVE_INLINE void multiply_add(const float* input, int64_t stride, const char* panel, int64_t num_inputs,
                                  Float<W> (&sums)[kRows][kVectors]) {
  const auto* weights = reinterpret_cast<const float*>(panel);
  for (int64_t k = 0; k < num_inputs; ++k, weights += kPanel) {
    Float<W> lanes[kVectors];
    MOESERVE_UNROLL
    for (int v = 0; v < kVectors; ++v) lanes[v] = load<W>(weights + v * W);
    MOESERVE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Float<W> value = broadcast<W>(input[r * stride + k]);
      MOESERVE_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[r][v] += value * lanes[v];
    }
  }
}

// Two inputs of an output share a word.
template <int W, int kRows, int kVectors>
MOESERVE_INLINE void multiply_add(const BFloat16* input, int64_t stride, const char* panel, int64_t num_inputs,
                                  Float<W> (&sums)[kRows][kVectors]) {
  const auto* weights = reinterpret_cast<const BFloat16*>(panel);
  for (int64_t k = 0; k < num_inputs; k += 2, weights += 2 * kPanel) {
    Pair<W> lanes[kVectors];
    MOESERVE_UNROLL
    for (int v = 0; v < kVectors; ++v) lanes[v] = load_pair<W>(weights + v * 2 * W);
    MOESERVE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Float<W> first = broadcast<W>(widen(input[r * stride + k]));
      const Float<W> second = broadcast<W>(widen(input[r * stride + k + 1]));
      MOESERVE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] += first * lanes[v].first;
        sums[r][v] += second * lanes[v].second;
      }
    }
  }
}

// Add kRows rows times kVectors vectors of outputs of one panel, from `output` on.
template <int W, int kRows, int kVectors, typename Element>
MOESERVE_INLINE void add_part(const Element* input, int64_t stride, const Block& block, int panel, int output,
                              float* sums) {
  float* targets = sums + panel * kPanel + output;
  Float<W> lanes[kRows][kVectors];
  const bool starts_at_zero = block.is_first || block.scales != nullptr;
  MOESERVE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    MOESERVE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      lanes[r][v] = starts_at_zero ? Float<W>{} : load<W>(targets + r * kTileOutputs + v * W);
    }
  }
  constexpr int kTogether = sizeof(Element) == 2 ? 2 : 1;
  const char* weights = block.panels[panel] + output * kTogether * sizeof(Element);
  multiply_add<W>(input, stride, weights, block.num_inputs, lanes);
  MOESERVE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    MOESERVE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      float* target = targets + r * kTileOutputs + v * W;
      if (block.scales != nullptr) {
        const Float<W> before = block.is_first ? Float<W>{} : load<W>(target);
        lanes[r][v] = before + lanes[r][v] * load<W>(block.scales + panel * kPanel + output + v * W);
      }
      store<W>(target, lanes[r][v]);
    }
  }
}

// Add the products of `num_rows` <= kRows rows with 64 outputs.
template <int W, int kRows, int kVectors, typename Element>
MOESERVE_INLINE void add_tile(const Element* input, int64_t stride, int num_rows, const Block& block, float* sums) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) return add_tile<W, kRows - 1, kVectors>(input, stride, num_rows, block, sums);
  }
  for (int panel = 0; panel < 2; ++panel) {
    for (int output = 0; output < kPanel; output += kVectors * W) {
      add_part<W, kRows, kVectors>(input, stride, block, panel, output, sums);
    }
  }
}

}  // namespace moeserve
