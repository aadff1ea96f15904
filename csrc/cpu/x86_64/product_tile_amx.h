// The inner loop of bfloat16 products with AMX: up to 16 rows times the 64 outputs of two panels.
//
// Tile registers 0 to 3 hold the sums, 4 the inputs of the rows, 5 to 7 the weights.

#pragma once

#include <cstdint>

#include "amx_tiles.h"
#include "cpu/product_tile.h"

namespace moeserve {

constexpr int kAmxLines = kAmxInputs * kTileOutputs * 2 / 64;  // cache lines of two panels in a step

// Memory of two panels to prefetch meanwhile: in each step, lines first_line to last_line of the kAmxLines that it
// reads.
struct AmxPrefetch {
  const char* panels[2];
  int first_line;
  int last_line;
};

// Add the products of some inputs to the sums: a multiple of 32 inputs, or fewer if the tile registers have fewer.
inline void amx_tile(const BFloat16* input, int64_t stride, const char* const (&panels)[2], int64_t num_inputs,
                     bool is_first, const AmxPrefetch& prefetch, float* targets) {
  constexpr int64_t kSumBytes = kTileOutputs * sizeof(float);
  constexpr int64_t kPairBytes = 4 * kPanel;
  if (is_first) {
    MOESERVE_TILE_ZERO(0);
    MOESERVE_TILE_ZERO(1);
    MOESERVE_TILE_ZERO(2);
    MOESERVE_TILE_ZERO(3);
  } else {
    MOESERVE_TILE_LOAD(0, targets, kSumBytes);
    MOESERVE_TILE_LOAD(1, targets + 16, kSumBytes);
    MOESERVE_TILE_LOAD(2, targets + 32, kSumBytes);
    MOESERVE_TILE_LOAD(3, targets + 48, kSumBytes);
  }
  for (int64_t k = 0; k < num_inputs; k += kAmxInputs) {
    const char* first = panels[0] + k / 2 * kPairBytes;
    const char* second = panels[1] + k / 2 * kPairBytes;
    for (int line = prefetch.first_line; line < prefetch.last_line; ++line) {
      __builtin_prefetch(prefetch.panels[line % 2] + k / 2 * kPairBytes + line / 2 * 64);
    }
    MOESERVE_TILE_LOAD(4, input + k, stride * 2);
    MOESERVE_TILE_LOAD(5, first, kPairBytes);
    MOESERVE_TILE_DOT(0, 4, 5);
    MOESERVE_TILE_LOAD(6, first + 64, kPairBytes);
    MOESERVE_TILE_DOT(1, 4, 6);
    MOESERVE_TILE_LOAD(7, second, kPairBytes);
    MOESERVE_TILE_DOT(2, 4, 7);
    MOESERVE_TILE_LOAD(5, second + 64, kPairBytes);
    MOESERVE_TILE_DOT(3, 4, 5);
  }
  MOESERVE_TILE_STORE(0, targets, kSumBytes);
  MOESERVE_TILE_STORE(1, targets + 16, kSumBytes);
  MOESERVE_TILE_STORE(2, targets + 32, kSumBytes);
  MOESERVE_TILE_STORE(3, targets + 48, kSumBytes);
}

}  // namespace moeserve
