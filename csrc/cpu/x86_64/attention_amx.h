// The products of attention with AMX, for tiles with up to 16 queries.
//
// Tile registers 0 to 3 hold the sums, 4 the queries or weights, 5 to 7 the keys or values. Packed keys and values have
// the form of such operands: a tile register takes 16 steps of 16 lanes of a strip.

#pragma once

#include "amx_tiles.h"
#include "cpu/attention_kernels.h"

namespace moeserve {

constexpr int kAmxSteps = kAmxInputs / 2;
constexpr int kAmxColumns = 16;

// Compute sums[r][0 to kTiles * 16) = sum over `num_steps` of the words of row r times the lanes of the strip.
template <typename L, int kTiles>
MOESERVE_INLINE void multiply_tiles(const uint32_t* rows, int64_t row_stride, const uint32_t* strip, int num_steps,
                                    float* sums, int64_t sums_stride) {
  static_assert(kTiles == 2 || kTiles == 4);
  constexpr int64_t kStripBytes = L::kStrip * sizeof(uint32_t);
  const int64_t row_bytes = row_stride * sizeof(uint32_t);
  const int64_t sums_bytes = sums_stride * sizeof(float);
  MOESERVE_TILE_ZERO(0);
  MOESERVE_TILE_ZERO(1);
  if constexpr (kTiles == 4) {
    MOESERVE_TILE_ZERO(2);
    MOESERVE_TILE_ZERO(3);
  }
  for (int step = 0; step < num_steps; step += kAmxSteps, strip += kAmxSteps * L::kStrip) {
    MOESERVE_TILE_LOAD(4, rows + step, row_bytes);
    MOESERVE_TILE_LOAD(5, strip, kStripBytes);
    MOESERVE_TILE_DOT(0, 4, 5);
    MOESERVE_TILE_LOAD(6, strip + kAmxColumns, kStripBytes);
    MOESERVE_TILE_DOT(1, 4, 6);
    if constexpr (kTiles == 4) {
      MOESERVE_TILE_LOAD(7, strip + 2 * kAmxColumns, kStripBytes);
      MOESERVE_TILE_DOT(2, 4, 7);
      MOESERVE_TILE_LOAD(5, strip + 3 * kAmxColumns, kStripBytes);
      MOESERVE_TILE_DOT(3, 4, 5);
    }
  }
  MOESERVE_TILE_STORE(0, sums, sums_bytes);
  MOESERVE_TILE_STORE(1, sums + kAmxColumns, sums_bytes);
  if constexpr (kTiles == 4) {
    MOESERVE_TILE_STORE(2, sums + 2 * kAmxColumns, sums_bytes);
    MOESERVE_TILE_STORE(3, sums + 3 * kAmxColumns, sums_bytes);
  }
}

template <typename L>
MOESERVE_INLINE void score_with_tiles(const Tile& tile, int head_size) {
  const int num_steps = L::key_steps(head_size);
  const auto* queries = static_cast<const uint32_t*>(tile.queries);
  const auto* keys = static_cast<const uint32_t*>(tile.packed);
  for (int at = tile.range.begin; at < tile.range.end;) {
    const uint32_t* strip = keys + at / L::kStrip * int64_t{L::kStrip} * num_steps + at % L::kStrip;
    if (at % L::kStrip == 0 && at + L::kStrip <= tile.range.end) {
      multiply_tiles<L, 4>(queries, num_steps, strip, num_steps, tile.scores + at, kBlock);
      at += L::kStrip;
    } else {
      multiply_tiles<L, 2>(queries, num_steps, strip, num_steps, tile.scores + at, kBlock);
      at += L::kStrip / 2;
    }
  }
}

// Return 16 rows at a distance of `stride` bytes, with zeros beyond the head size: the keys themselves, or a copy.
template <typename L>
MOESERVE_INLINE const void* rows_of_tile(const void* const* keys, int head_size, uint32_t* copies, int64_t& stride) {
  const auto* first = static_cast<const char*>(keys[0]);
  const int64_t row_bytes = head_size * sizeof(BFloat16);
  bool is_dense = head_size % kAmxInputs == 0;
  for (int i = 1; i < kAmxRows; ++i) is_dense &= keys[i] == first + i * row_bytes;
  stride = row_bytes;
  if (is_dense) return first;
  const int num_steps = L::key_steps(head_size);
  for (int i = 0; i < kAmxRows; ++i) {
    copy_query(static_cast<const BFloat16*>(keys[i]), head_size, num_steps, copies + i * num_steps);
  }
  stride = num_steps * sizeof(uint32_t);
  return copies;
}

// Compute the same scores with keys read in place. The keys are the first operand, and the queries the second.
template <typename L>
MOESERVE_INLINE void score_in_place_with_tiles(const Tile& tile, int head_size) {
  constexpr int W = L::W;
  constexpr int64_t kLineBytes = kAmxColumns * sizeof(float);
  const int num_steps = L::key_steps(head_size);
  auto* queries = static_cast<uint32_t*>(tile.packed);  // [num_steps, 16]
  uint32_t* copies = queries + num_steps * kAmxColumns;
  const char* rows[kAmxRows];
  Float<W> columns[W];
  for (int r = 0; r < kAmxRows; ++r) {
    rows[r] = static_cast<const char*>(tile.queries) + r * num_steps * sizeof(uint32_t);
  }
  for (int step = 0; step < num_steps; step += kAmxSteps) {
    load_transposed<W>(rows, step * sizeof(uint32_t), columns);
    std::memcpy(queries + step * kAmxColumns, columns, sizeof(columns));
  }
  alignas(64) float sums[kBlock][kAmxColumns];
  const bool has_values = tile.values[tile.range.begin] != tile.keys[tile.range.begin];
  for (int at = tile.range.begin; at < tile.range.end; at += kAmxRows) {
    int64_t stride;
    const auto* keys = static_cast<const char*>(rows_of_tile<L>(tile.keys + at, head_size, copies, stride));
    MOESERVE_TILE_ZERO(0);
    for (int step = 0; step < num_steps; step += kAmxSteps) {
      MOESERVE_TILE_LOAD(4, queries + step * kAmxColumns, kLineBytes);
      MOESERVE_TILE_LOAD(5, keys + step * sizeof(uint32_t), stride);
      MOESERVE_TILE_DOT(0, 5, 4);
    }
    MOESERVE_TILE_STORE(0, sums[at], kLineBytes);
    // While keys are read, memory is busy, but weights and products leave it idle, so the values are requested here.
    if (has_values) prefetch({tile.values, tile.seen}, at, kAmxRows, 0, head_size * sizeof(BFloat16));
  }
  for (int at = tile.range.begin; at < tile.range.end; at += kAmxRows) {
    for (int i = 0; i < kAmxRows; ++i) rows[i] = reinterpret_cast<const char*>(sums[at + i]);
    for (int first = 0; first < tile.num_queries; first += 4) {
      load_four_transposed<W>(rows, 4 * first, columns);
      MOESERVE_UNROLL
      for (int r = 0; r < 4; ++r) store<W>(tile.scores + (first + r) * kBlock + at, columns[r]);
    }
  }
}

// Positions without weight are skipped only in groups of 16 steps from the start of the block, because the order of
// additions depends on the groups.
template <typename L>
MOESERVE_INLINE void add_with_tiles(const Tile& tile, int strip, int value_size, int64_t values_stride) {
  constexpr int W = L::W;
  const Range steps = steps_of<L>(tile.range);
  const int num_steps = steps.end - steps.begin;
  const auto* weights = static_cast<const uint32_t*>(tile.weights) + steps.begin;
  const auto* packed =
      static_cast<const uint32_t*>(tile.packed) + int64_t{strip} * L::kValueStrip + steps.begin * L::kStrip;
  float* values = tile.states.values + strip * L::kStrip;
  const int num_vectors = std::min(4, (value_size - strip * L::kStrip + W - 1) / W);
  if (num_vectors > 2) {
    multiply_tiles<L, 4>(weights, L::kWeights, packed, num_steps, tile.scores, L::kStrip);
  } else {
    multiply_tiles<L, 2>(weights, L::kWeights, packed, num_steps, tile.scores, L::kStrip);
  }
  for (int r = 0; r < tile.num_queries; ++r) {
    const Float<W> factor = broadcast<W>(tile.factors[r]);
    for (int v = 0; v < num_vectors; ++v) {
      float* target = values + r * values_stride + v * W;
      store<W>(target, load<W>(target) * factor + load<W>(tile.scores + r * L::kStrip + v * W));
    }
  }
}

}  // namespace moeserve
