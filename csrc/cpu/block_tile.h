// The inner loops of products with weights in GGUF's block formats.
//
// The dot products of groups, times their integer scales, are summed as 32-bit integers over a block. Each block then
// takes two multiply-adds of floats. So results have the same bits with every instruction set.

#pragma once

#include <cstdint>

#include "lanes.h"
#include "product_tile.h"
#include "weight_format.h"

namespace moeserve {

// The values of IQ4_XS codes.
constexpr int8_t kValuesOfIQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

constexpr ByteTable table_of_iq4(int offset) {
  ByteTable table{};
  for (int i = 0; i < 16; ++i) table.bytes[i] = static_cast<uint8_t>(kValuesOfIQ4[i] + offset);
  return table;
}

// Return true if codes stand for the values of IQ4_XS.
constexpr bool has_iq4_codes(WeightFormat format) {
  return format == WeightFormat::kIQ4_XS || format == WeightFormat::kIQ4_NL;
}

// Weights are integer scales times (code - offset). Return the offset.
constexpr int offset_of_codes(WeightFormat format) {
  if (format == WeightFormat::kQ4_0) return 8;
  return format == WeightFormat::kQ6_K ? 32 : (format == WeightFormat::kQ5_0 ? 16 : 0);
}

// The codes of a type. Kinds of products derive from this class and define, besides what product_tile.h lists:
//   kSumSteps   steps whose sums fit in Sums
//   Values      a part of `weights` in the form that `add` takes
//   begin       returns the sums of no step, given the sums of a row's quarters: zero, or a correction of the codes
//   scales      returns integer scales in the form that `scaled` takes
//   scaled      returns sums times scales, one for each output
//   dot_pairs   returns the sums of the products of two 16-bit integers for each output
template <int kWidth, WeightFormat kType>
struct BlockWeights {
  static constexpr int W = kWidth;
  static constexpr bool kIsBlock = true;
  static constexpr WeightFormat kFormat = kType;
  static constexpr BlockLayout kLayout = traits_of(kType).blocks;
  static constexpr int kStepInputs = 4;
  static constexpr int kStepBytes = 2 * kPanel;
  static constexpr int kRowBytes = 4;
  static constexpr int kScaleSteps = kLayout.scale_inputs / kStepInputs;
  using Int = typename Vector<W>::Int;
  using UInt = typename Vector<W>::UInt;

  // Return the codes of a step of a group, for vector `v` of the panel.
  static MOESERVE_INLINE UInt codes(const char* group, int step, int v) {
    constexpr int kVectorsOfHalf = kPanel / 2 / W;
    const UInt low = load_words<W>(group + step * kStepBytes + v % kVectorsOfHalf * W * 4);
    UInt codes = (v < kVectorsOfHalf ? low : low >> 4) & 0x0F0F0F0Fu;
    if constexpr (kLayout.high_bits > 0) {
      constexpr int kSteps = 8 / kLayout.high_bits;  // in a byte
      const UInt high = load_words<W>(group + kInt4ScalesAt + step / kSteps * 4 * kPanel + v * W * 4);
      const int shift = step % kSteps * kLayout.high_bits - 4;
      codes |= (shift < 0 ? high << -shift : high >> shift) & (kLayout.high_bits == 1 ? 0x10101010u : 0x30303030u);
    }
    return codes;
  }
};

// Multiply kRows rows with kVectors vectors of outputs from `kFirst` on: those of one panel, or all of two.
template <typename Products, int kRows, int kFirst, int kVectors>
MOESERVE_INLINE void multiply_blocks(const TileRows& rows, const Block& block, Prefetch& prefetch, float* sums) {
  constexpr int W = Products::W;
  constexpr BlockLayout kLayout = Products::kLayout;
  constexpr int kScaleSteps = Products::kScaleSteps;
  constexpr bool kHasBoth = kVectors > kPanelVectors<W>;
  using Int = typename Vector<W>::Int;
  const int groups = static_cast<int>(block.group_steps * Products::kStepInputs / kInputGroup);
  const char* next = prefetch.next;
  const char* words = block.words;
  const char* row = rows.words;
  const char* quarters = rows.quarters;
  const char* row_sums = rows.sums;
  for (int64_t index = 0; index < block.num_groups; ++index) {
    Int totals[kRows][kVectors] = {};
    for (int byte = 0; prefetch.is_fast && byte < kLayout.codes_at(groups); byte += 64, next += 64) {
      prefetch_line<kHasBoth>(next, block);
    }
    const char* scales = words + kLayout.scales_at(groups);
    for (int group = 0; group < groups; ++group) {
      const char* codes = words + kLayout.codes_at(groups) + group * kLayout.group_bytes();
      MOESERVE_UNROLL
      for (int first = 0; first < kInputGroup / 4; first += kScaleSteps) {
        decltype(Products::scales(scales)) scales_of[kVectors];
        MOESERVE_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          const int vector = (kFirst + v) % kPanelVectors<W>;
          scales_of[v] = Products::scales(panel_of<W>(scales, block, kFirst + v) + vector * W);
        }
        scales += kPanel;
        MOESERVE_UNROLL
        for (int part = first; part < first + kScaleSteps; part += Products::kSumSteps) {
          typename Products::Sums lanes[kRows][kVectors];
          MOESERVE_UNROLL
          for (int r = 0; r < kRows; ++r) {
            const auto begin = Products::begin(quarters + r * rows.stride + part / 4 * 4);
            MOESERVE_UNROLL
            for (int v = 0; v < kVectors; ++v) lanes[r][v] = begin;
          }
          MOESERVE_UNROLL
          for (int step = part; step < part + Products::kSumSteps; ++step) {
            if (next < prefetch.end) prefetch_line<kHasBoth>(next, block);
            next += 64;
            MOESERVE_UNROLL
            for (int v = 0; v < kVectors; ++v) {
              const char* of_panel = panel_of<W>(codes, block, kFirst + v);
              const auto weights = Products::weights(of_panel, step, (kFirst + v) % kPanelVectors<W>);
              MOESERVE_UNROLL
              for (int r = 0; r < kRows; ++r) {
                Products::add(lanes[r][v], weights, broadcast_word<W>(row + r * rows.stride + 4 * step));
              }
            }
          }
          MOESERVE_UNROLL
          for (int r = 0; r < kRows; ++r) {
            MOESERVE_UNROLL
            for (int v = 0; v < kVectors; ++v) totals[r][v] += Products::scaled(lanes[r][v], scales_of[v]);
          }
        }
      }
      for (int line = 0; prefetch.is_fast && line < 2 * kLayout.high_bits; ++line, next += 64) {
        prefetch_line<kHasBoth>(next, block);
      }
      row += kInputGroup;
      quarters += 4 * sizeof(int16_t);
    }
    MOESERVE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const char* of_panel = panel_of<W>(words, block, kFirst + v);
      const int vector = (kFirst + v) % kPanelVectors<W>;
      const char* of_vector = of_panel + vector * W * 2;
      const Float<W> scale = load_float16<W>(of_vector);
      const Float<W> minimum = kLayout.has_minima ? load_float16<W>(of_vector + 2 * kPanel) : Float<W>{};
      MOESERVE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const Float<W> of_row =
            broadcast<W>(*reinterpret_cast<const float*>(rows.scales + r * rows.stride + 4 * index));
        float* target = sums + r * kTileOutputs + (kFirst + v) * W;
        Float<W> sum = block.is_first && index == 0 ? Float<W>{} : load<W>(target);
        sum += __builtin_convertvector(totals[r][v], Float<W>) * (scale * of_row);
        if constexpr (kLayout.has_minima) {
          Int minima = {};
          for (int pair = 0; pair < (groups + 1) / 2; ++pair) {
            const char* of_pair = of_panel + kLayout.minima_at() + (pair * kPanel + vector * W) * 2;
            minima += Products::dot_pairs(load_bytes_as_halves<W>(of_pair),
                                          broadcast_word<W>(row_sums + r * rows.stride + 4 * pair));
          }
          sum -= __builtin_convertvector(minima, Float<W>) * (minimum * of_row);
        }
        store<W>(target, sum);
      }
    }
    words += kLayout.block_bytes(groups);
    row_sums += groups * sizeof(int16_t);
  }
  prefetch.next = next;
}

}  // namespace moeserve
