// Sums of the products of one item: several rows times 64 outputs.

#pragma once

#include <algorithm>
#include <cstdint>

#include "block_tile.h"
#include "isa.h"
#include "product_tile.h"
#include "quantized_rows.h"
#include "weight_format.h"

namespace moeserve {

constexpr int kBlockInputs = 256;         // inputs of a panel that fit in the L1 cache while tiles use them
constexpr int64_t kPrefetchBytes = 4096;  // prefetch distance where panels are read only once

// The rows and panels of one item.
struct ProductWork {
  WeightFormat format;
  PanelUnit unit;
  const char* input;
  int64_t input_bytes;  // distance between rows
  const char* panels[2];
  int64_t next_item;  // bytes from a panel to the panel of the next item
  int num_rows;
  int64_t num_inputs;
  bool is_first = true;  // overwrite the sums instead of adding to them
};

// Computes sums [num_rows, kTileOutputs].
using Accumulate = void (*)(const ProductWork& work, float* sums);

// Return the function of an instruction set.
Accumulate choose_accumulate(Isa isa);

// Return true if the function of an instruction set expects rows in a wider form: quantised ones as 16-bit integers,
// those for weights in bfloat16 as float32.
bool widens_rows(WeightFormat format, Isa isa);

// Return the layout of quantised rows, or of their chunk with `num_inputs`.
inline QuantizedRowLayout row_layout(WeightFormat format, const PanelUnit& unit, int64_t num_inputs, bool is_widened) {
  return {num_inputs, unit.inputs, traits_of(format).has_blocks(), is_widened};
}

// Return the number of rows of tile t, where tiles of similar size cover the remaining `num_left` rows.
inline int rows_of_tile(int t, int num_tiles, int num_left) { return (num_left + num_tiles - t - 1) / (num_tiles - t); }

// Return the number of vectors of outputs that a tile computes at once.
template <typename Products>
constexpr int vectors_at_once(int num_rows) {
  constexpr int kAll = kPanel / Products::W;
  return num_rows * kAll > kMaxSums<Products::W> ? kFewVectors<Products::W> : kAll;
}

// The maximum number of rows whose sums for the outputs of two panels fit in the registers.
template <typename Products>
constexpr int kMaxRowsOfBoth = Products::kMaxRows * kFewVectors<Products::W> / (2 * kPanelVectors<Products::W>);

// Multiply `num_rows` <= kRows rows with the 32 outputs of a panel, or with the 64 of two.
template <typename Products, int kNumPanels, int kRows>
MOESERVE_INLINE void multiply_tile(const TileRows& rows, int num_rows, const Block& block, Prefetch& prefetch,
                                   float* sums) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) return multiply_tile<Products, kNumPanels, kRows - 1>(rows, num_rows, block, prefetch, sums);
  }
  constexpr int kAll = kNumPanels * kPanelVectors<Products::W>;
  constexpr int kVectors = kNumPanels == 2 ? kAll : vectors_at_once<Products>(kRows);
  if constexpr (Products::kIsBlock) {
    multiply_blocks<Products, kRows, 0, kVectors>(rows, block, prefetch, sums);
    if constexpr (kVectors < kAll) multiply_blocks<Products, kRows, kVectors, kVectors>(rows, block, prefetch, sums);
  } else {
    multiply_vectors<Products, kRows, 0, kVectors>(rows, block, prefetch, sums);
    if constexpr (kVectors < kAll) multiply_vectors<Products, kRows, kVectors, kVectors>(rows, block, prefetch, sums);
  }
}

// Compute the sums of all rows, block by block. Few rows read both panels at once, because a core reads two streams of
// memory faster than one; others read panel by panel.
template <typename Products>
MOESERVE_INLINE void accumulate(const ProductWork& work, float* sums) {
  const WeightFormat format = work.format;
  const PanelUnit unit = work.unit;
  const int num_tiles = (work.num_rows + Products::kMaxRows - 1) / Products::kMaxRows;
  const QuantizedRowLayout layout = row_layout(format, unit, work.num_inputs, Products::kRowBytes == 8);
  const bool has_both = work.num_rows <= kMaxRowsOfBoth<Products>;
  const bool is_at_once = num_tiles == 1 && vectors_at_once<Products>(work.num_rows) * Products::W == kPanel;
  const auto bytes_of = [&](int64_t num_inputs) { return num_inputs / unit.inputs * unit.bytes; };
  const int64_t ahead = is_at_once ? kPrefetchBytes : bytes_of(kBlockInputs);
  const int64_t num_bytes = bytes_of(work.num_inputs);
  for (int p = 0; p < (has_both ? 1 : 2); ++p) {
    const char* panel = work.panels[p];
    const char* next_panel = p == 0 && !has_both ? work.panels[1] : work.panels[0] + work.next_item;
    for (int64_t first = 0; first < work.num_inputs; first += kBlockInputs) {
      const int64_t count = std::min<int64_t>(kBlockInputs, work.num_inputs - first);
      const int64_t num_groups = is_quantized(format) ? count / unit.inputs : 1;
      const int64_t begin = bytes_of(first);
      const Block block{panel + begin, work.panels[1] - work.panels[0], num_groups,
                        count / num_groups / Products::kStepInputs, work.is_first && first == 0};
      const char* next = begin + ahead < num_bytes ? panel + begin + ahead : next_panel + begin + ahead - num_bytes;
      Prefetch prefetch{next, next + bytes_of(count), is_at_once};
      const char* input = work.input + first / Products::kStepInputs * Products::kRowBytes;
      const char* scales = work.input + layout.scales_at() + first / unit.inputs * layout.scale_bytes();
      const char* quarters = work.input + layout.quarters_at() + first / kInputGroup * 4 * sizeof(int16_t);
      const char* group_sums = work.input + layout.sums_at() + first / kInputGroup * sizeof(int16_t);
      for (int t = 0, row = 0; t < num_tiles; ++t) {
        const int rows = rows_of_tile(t, num_tiles, work.num_rows - row);
        const int64_t offset = row * work.input_bytes;
        const TileRows tile{input + offset, scales + offset, quarters + offset, group_sums + offset, work.input_bytes};
        if constexpr (kMaxRowsOfBoth<Products> > 0) {
          if (has_both) {
            multiply_tile<Products, 2, kMaxRowsOfBoth<Products>>(tile, rows, block, prefetch, sums);
            break;
          }
        }
        float* of_panel = sums + row * kTileOutputs + p * kPanel;
        multiply_tile<Products, 1, Products::kMaxRows>(tile, rows, block, prefetch, of_panel);
        row += rows;
      }
    }
  }
}

// Compute the sums with the kind of product that fits the format of the weight, searched from number `kFirst` on.
// `Tile<W, format>` is an instruction set's kind of product with quantised weights.
template <int W, typename BFloat16Products, template <int, WeightFormat> typename Tile, int kFirst = 0>
MOESERVE_INLINE void accumulate(const ProductWork& work, float* sums) {
  if constexpr (kFirst < kNumFormats) {
    constexpr auto kFormat = static_cast<WeightFormat>(kFirst);
    if (work.format != kFormat) return accumulate<W, BFloat16Products, Tile, kFirst + 1>(work, sums);
    if constexpr (kFormat == WeightFormat::kFloat32) {
      accumulate<Float32Products<W>>(work, sums);
    } else if constexpr (kFormat == WeightFormat::kBFloat16) {
      accumulate<BFloat16Products>(work, sums);
    } else if constexpr (is_quantized(kFormat)) {
      accumulate<Tile<W, kFormat>>(work, sums);
    }
  }
}

}  // namespace moeserve
