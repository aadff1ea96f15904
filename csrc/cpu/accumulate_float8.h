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

// Add the products of two inputs of a row.
template <typename Products>
MOESERVE_INLINE void add_pair(Float<Products::W>& sums, const typename Vector<Products::W>::UInt& weights,
                              const char* row) {
  if constexpr (Products::kParts == 2) {
    sums += Products::template widen_part<0>(weights) * Products::template values<0>(row);
    sums += Products::template widen_part<1>(weights) * Products::template values<1>(row);
  } else {
    Products::add(sums, weights, Products::template values<0>(row));
  }
}

// Multiply the rows with a unit of a panel.
template <typename Products, int kRows, typename Decoder>
MOESERVE_INLINE void multiply_unit(const char* rows, int64_t stride, const char* codes, int64_t num_inputs,
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
          const char* row = rows + r * stride + k / 2 * Products::kRowBytes;
          add_pair<Products>(lanes[r][v], weights[v].first, row);
          add_pair<Products>(lanes[r][v], weights[v].second, row + Products::kRowBytes);
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
  for (int64_t first = 0; first < work.num_inputs; first += work.unit.inputs) {
    const char* rows = work.input + first / 2 * Products::kRowBytes;
    for (int p = 0; p < 2; ++p) {
      const char* unit = work.panels[p] + first / work.unit.inputs * work.unit.bytes;
      with_decoder<Products::W>(unit, [&](const auto& decoder) __attribute__((always_inline)) {
        multiply_unit<Products, kRows>(rows, work.input_bytes, unit + kFloat8CodesAt, work.unit.inputs, decoder,
                                       first == 0, sums + p * kPanel);
      });
    }
  }
}

// Decode both panels block by block, and multiply them with the function of an instruction set for bfloat16.
template <int W>
MOESERVE_INLINE void decode_and_multiply(const ProductWork& work, Isa isa, float* sums) {
  const Accumulate accumulate_bfloat16 = choose_accumulate(isa);
  const int64_t input_bytes = widens_rows(work.format, isa) ? sizeof(float) : sizeof(BFloat16);
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
    part.input = work.input + first * input_bytes;
    part.is_first = first == 0;
    accumulate_bfloat16(part, sums);
  }
}

}  // namespace moeserve
