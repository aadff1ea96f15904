// Sums of products with weights in FP8, which have the bits of sums with the dequantised weights in bfloat16.
//
// Few rows are multiplied with weights that are decoded in registers. For more rows, both panels are decoded block by
// block in the L1 cache, and multiplied by the functions for bfloat16.

#pragma once

#include <cstdint>

#include "accumulate.h"
#include "float8_panels.h"
#include "isa.h"

namespace moeserve {

constexpr int kFewFloat8Rows = 4;

// Return the function of an instruction set.
Accumulate choose_accumulate_float8(Isa isa);

// The number of vectors of outputs whose sums fit in the registers, next to tables and decoded weights.
template <int W, int kRows>
constexpr int kFloat8Vectors = W == 16 || kRows > 2 ? 2 : 4;

// The rows of a unit: words of two bfloat16, or, for products that widen them, float32.
template <typename Products, int kRows>
struct UnitRows {
  static constexpr int W = Products::W;
  static constexpr bool kWidens = Products::kParts == 2;
  const char* words;
  int64_t stride;
  alignas(64) float widened[kWidens ? kRows : 1][kWidens ? kFloat8Inputs : 1];

  MOESERVE_INLINE void set(const char* rows, int64_t row_bytes, int64_t num_inputs) {
    words = rows;
    stride = row_bytes;
    for (int r = 0; kWidens && r < kRows; ++r) {
      const auto* row = reinterpret_cast<const BFloat16*>(rows + r * stride);
      for (int64_t k = 0; k < num_inputs; k += W) store<W>(widened[r] + k, load_in_order<W>(row + k));
    }
  }
  // Add the products of inputs k and k + 1 of a row.
  MOESERVE_INLINE void add(Float<W>& sums, const typename Vector<W>::UInt& weights, int r, int64_t k) const {
    if constexpr (kWidens) {
      sums += Products::template widen_part<0>(weights) * broadcast<W>(widened[r][k]);
      sums += Products::template widen_part<1>(weights) * broadcast<W>(widened[r][k + 1]);
    } else {
      const char* word = words + r * stride + k * static_cast<int64_t>(sizeof(BFloat16));
      Products::add(sums, weights, Products::template values<0>(word));
    }
  }
};

// Multiply the rows with a unit of a panel.
template <typename Products, int kRows, typename Decoder>
MOESERVE_INLINE void multiply_unit(const UnitRows<Products, kRows>& rows, const char* codes, int64_t num_inputs,
                                   const Decoder& decoder, bool is_first, float* sums) {
  constexpr int W = Products::W;
  constexpr int kVectors = kFloat8Vectors<W, kRows>;
  for (int first = 0; first < kPanel / W; first += kVectors) {
    Float<W> lanes[kRows][kVectors];
    MOESERVE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      MOESERVE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        lanes[r][v] = is_first ? Float<W>{} : load<W>(sums + r * kTileOutputs + (first + v) * W);
      }
    }
    for (int64_t k = 0; k < num_inputs; k += 4) {
      FourInputs<W> weights[kVectors];
      MOESERVE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const char* source = codes + k * kPanel + (first + v) * 4 * W;
        __builtin_prefetch(source + kFloat8Ahead);
        weights[v] = decoder.decode(load_words<W>(source), k, first + v);
      }
      MOESERVE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        MOESERVE_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          rows.add(lanes[r][v], weights[v].first, r, k);
          rows.add(lanes[r][v], weights[v].second, r, k + 2);
        }
      }
    }
    MOESERVE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      MOESERVE_UNROLL
      for (int v = 0; v < kVectors; ++v) store<W>(sums + r * kTileOutputs + (first + v) * W, lanes[r][v]);
    }
  }
}

// Multiply up to kRows rows with both panels of an item.
template <typename Products, int kRows = kFewFloat8Rows>
MOESERVE_INLINE void multiply_few_rows(const ProductWork& work, float* sums) {
  if constexpr (kRows > 1) {
    if (work.num_rows < kRows) return multiply_few_rows<Products, kRows - 1>(work, sums);
  }
  UnitRows<Products, kRows> rows;
  for (int64_t first = 0; first < work.num_inputs; first += work.unit.inputs) {
    rows.set(work.input + first * static_cast<int64_t>(sizeof(BFloat16)), work.input_bytes, work.unit.inputs);
    for (int p = 0; p < 2; ++p) {
      const char* unit = work.panels[p] + first / work.unit.inputs * work.unit.bytes;
      with_decoder<Products::W>(unit, [&](const auto& decoder) __attribute__((always_inline)) {
        multiply_unit(rows, unit + kFloat8CodesAt, work.unit.inputs, decoder, first == 0, sums + p * kPanel);
      });
    }
  }
}

// Decode both panels block by block, and multiply them with `accumulate_bfloat16`.
template <int W>
MOESERVE_INLINE void decode_and_multiply(const ProductWork& work, Accumulate accumulate_bfloat16, float* sums) {
  alignas(64) char decoded[2][kFloat8Inputs * kPanel * sizeof(BFloat16)];
  ProductWork part = work;
  part.format = WeightFormat::kBFloat16;
  part.unit = panel_unit(part.format, work.unit.inputs);
  part.next_item = 0;
  part.num_inputs = work.unit.inputs;
  for (int64_t first = 0; first < work.num_inputs; first += part.num_inputs) {
    for (int p = 0; p < 2; ++p) {
      decode_unit<W>(work.panels[p] + first / work.unit.inputs * work.unit.bytes, work.unit.inputs, decoded[p]);
      part.panels[p] = decoded[p];
    }
    part.input = work.input + first * static_cast<int64_t>(sizeof(BFloat16));
    part.is_first = first == 0;
    accumulate_bfloat16(part, sums);
  }
}

}  // namespace moeserve
