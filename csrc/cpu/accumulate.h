// Sums of the products of one item: several rows times 64 outputs.

#pragma once

#include <algorithm>
#include <cstdint>

#include "isa.h"
#include "packed_weight.h"
#include "product_tile.h"
#include "quantized_rows.h"

namespace moeserve {

constexpr int kBlockInputs = 256;         // inputs of a panel that fit in the L1 cache while tiles use them
constexpr int64_t kPrefetchBytes = 2048;  // prefetch distance where panels are read only once

// The rows and panels of one item.
struct ProductWork {
  WeightFormat format;
  const char* input;
  int64_t input_bytes;  // distance between rows
  const char* panels[2];
  int64_t next_item;  // bytes from a panel to the panel of the next item
  int num_rows;
  int64_t num_inputs;
};

// Computes sums [num_rows, kTileOutputs].
using Accumulate = void (*)(const ProductWork& work, float* sums);

// Return the function of an instruction set.
Accumulate choose_accumulate(Isa isa);

// Return true if the function of an instruction set expects quantised rows as 16-bit integers.
bool widens_rows(WeightFormat format, Isa isa);

inline bool is_quantized(WeightFormat format) {
  return format != WeightFormat::kFloat32 && format != WeightFormat::kBFloat16;
}

inline int64_t bytes_per_input(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFloat32:
      return 4 * kPanel;
    case WeightFormat::kBFloat16:
      return 2 * kPanel;
    case WeightFormat::kInt8:
      return kPanel;
    case WeightFormat::kInt4:
      return kInt4GroupBytes / kInputGroup;
    case WeightFormat::kMxfp4:
      break;
  }
  return kMxfp4GroupBytes / kInputGroup;
}

// Return the layout of quantised rows.
inline QuantizedRowLayout row_layout(WeightFormat format, int64_t num_inputs, bool is_widened) {
  return {padded_inputs(format, num_inputs), is_widened};
}

// Return the number of rows of tile t, where tiles of similar size cover the remaining `num_left` rows.
inline int rows_of_tile(int t, int num_tiles, int num_left) { return (num_left + num_tiles - t - 1) / (num_tiles - t); }

// Compute the sums of all rows, panel by panel and block by block. Memory is read as one stream, partly prefetched.
template <typename Products>
MOESERVE_INLINE void accumulate(const ProductWork& work, float* sums) {
  const WeightFormat format = work.format;
  const int64_t input_bytes = bytes_per_input(format);
  const int num_tiles = (work.num_rows + Products::kMaxRows - 1) / Products::kMaxRows;
  const int64_t scales_at = row_layout(format, work.num_inputs, Products::kRowBytes == 8).scales_at();
  const bool is_at_once = num_tiles == 1 && vectors_at_once<Products>(work.num_rows) * Products::W == kPanel;
  const int64_t ahead = is_at_once ? kPrefetchBytes : kBlockInputs * input_bytes;
  for (int p = 0; p < 2; ++p) {
    const char* panel = work.panels[p];
    const char* next_panel = p == 0 ? work.panels[1] : work.panels[0] + work.next_item;
    const int64_t num_bytes = work.num_inputs * input_bytes;
    for (int64_t first = 0; first < work.num_inputs; first += kBlockInputs) {
      const int64_t count = std::min<int64_t>(kBlockInputs, work.num_inputs - first);
      const int64_t num_groups = is_quantized(format) ? count / kInputGroup : 1;
      const int64_t begin = first * input_bytes;
      const Block block{panel + begin, num_groups, count / num_groups / Products::kStepInputs, first == 0};
      const char* next = begin + ahead < num_bytes ? panel + begin + ahead : next_panel + begin + ahead - num_bytes;
      Prefetch prefetch{next, next + count * input_bytes, is_at_once};
      const char* input = work.input + first / Products::kStepInputs * Products::kRowBytes;
      const char* scales = work.input + scales_at + first / kInputGroup * static_cast<int64_t>(sizeof(RowScale));
      for (int t = 0, row = 0; t < num_tiles; ++t) {
        const int rows = rows_of_tile(t, num_tiles, work.num_rows - row);
        const int64_t offset = row * work.input_bytes;
        const TileRows tile{input + offset, scales + offset, work.input_bytes};
        multiply_tile<Products>(tile, rows, block, prefetch, sums + row * kTileOutputs + p * kPanel);
        row += rows;
      }
    }
  }
}

// The same with the products of an instruction set that fit the format of the weight.
template <int W, typename BFloat16Products, typename Int8Products, typename Int4Products, typename Mxfp4Products>
MOESERVE_INLINE void accumulate(const ProductWork& work, float* sums) {
  switch (work.format) {
    case WeightFormat::kFloat32:
      return accumulate<Float32Products<W>>(work, sums);
    case WeightFormat::kBFloat16:
      return accumulate<BFloat16Products>(work, sums);
    case WeightFormat::kInt8:
      return accumulate<Int8Products>(work, sums);
    case WeightFormat::kInt4:
      return accumulate<Int4Products>(work, sums);
    case WeightFormat::kMxfp4:
      return accumulate<Mxfp4Products>(work, sums);
  }
}

}  // namespace moeserve
