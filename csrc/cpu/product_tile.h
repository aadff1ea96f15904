// The inner loops of products: a few rows times the 32 outputs of a panel, for vectors of any width.
//
// A tile processes inputs in steps. A step multiplies words of a row with a vector of words of the panel, one word per
// output. The steps of a sum are in the order of K, which alone determines the bits of the sum.

#pragma once

#include <algorithm>
#include <cstdint>

#include "lanes.h"
#include "quantized_rows.h"
#include "weight_format.h"

namespace moeserve {

constexpr int kTileOutputs = 2 * kPanel;  // adjacent sums of a row: those of two panels

// The number of vectors of sums that fit in the registers, next to weights and values.
template <int W>
constexpr int kMaxSums = W == 16 ? 24 : (W == 8 ? 12 : 20);

// The number of vectors of outputs that a tile of many rows computes at once.
template <int W>
constexpr int kFewVectors = std::max(2, kPanel / W / 2);

// A range of inputs of a panel, or of two panels.
struct Block {
  const char* words;
  int64_t second_panel;  // distance in bytes to the same inputs of the second panel
  int64_t num_groups;    // groups (or blocks) of inputs, whose sums are scaled together
  int64_t group_steps;
  bool is_first;  // overwrite the sums instead of adding to them
};

// Prefetch to the L2 cache. More lines can be on their way there than to the L1 cache, so that a core reads a stream of
// memory up to a seventh faster while it computes.
MOESERVE_INLINE void prefetch_to_l2(const char* line) { __builtin_prefetch(line, 0, 2); }

// Memory to prefetch meanwhile, some cache lines in each step: as many as the step reads if all rows and outputs are
// computed at once, otherwise one. A tile of two panels prefetches the same lines of both.
struct Prefetch {
  const char* next;
  const char* end;
  bool is_fast;
};

// The vectors of outputs of a panel. A tile of two panels numbers those of the second one from here on.
template <int W>
constexpr int kPanelVectors = kPanel / W;

// Return the address of vector `v` in its panel, given that of the first panel.
template <int W>
MOESERVE_INLINE const char* panel_of(const char* words, const Block& block, int v) {
  return v < kPanelVectors<W> ? words : words + block.second_panel;
}

// Prefetch a line, and that of the second panel if the tile has both.
template <bool kHasBoth>
MOESERVE_INLINE void prefetch_line(const char* line, const Block& block) {
  prefetch_to_l2(line);
  if constexpr (kHasBoth) prefetch_to_l2(line + block.second_panel);
}

// Some rows, starting at the first input of a block. The parts of quantised rows: see QuantizedRowLayout.
struct TileRows {
  const char* words;
  const char* scales;
  const char* quarters;
  const char* sums;
  int64_t stride;  // distance between rows in bytes, for all

  const RowScale& scale(int row, int64_t group) const {
    return reinterpret_cast<const RowScale*>(scales + row * stride)[group];
  }
};

// A kind of product is described by a class with:
//   W           lanes of a vector
//   kMaxRows    maximum rows of a tile, whose sums must fit in the registers
//   kStepInputs inputs of a step
//   kStepBytes  bytes of the panel that a step reads
//   kRowBytes   bytes of a row that a step reads
//   kParts      multiply-adds of vectors that a step consists of
//   Sums        a vector of sums
//   Scales      the factors on the sums of a group of inputs, for a vector of outputs
//   weights     returns one part of a vector of words: vector `v` of the panel
//   values      returns one part of a row's words, in all lanes
//   add         adds weights times values to sums
//   scales      reads the scales of a group, which begins at `words`
//   begin, end  begin the sums of a group, and add them to those of the groups before it

// Sums in float32, which continue from block to block. Each block is one group.
template <int kWidth>
struct FloatSums {
  static constexpr int W = kWidth;
  static constexpr bool kIsBlock = false;
  static constexpr int kMaxRows = kMaxSums<W> / kFewVectors<W>;
  static constexpr int kStepBytes = 4 * kPanel;
  static constexpr int kRowBytes = 4;
  static constexpr int64_t kGroupBytes = 0;
  using Sums = Float<W>;
  struct Scales {};

  static MOESERVE_INLINE void add(Sums& sums, const Float<W>& weights, const Float<W>& values) {
    sums += weights * values;
  }
  static MOESERVE_INLINE Scales scales(const char*, int) { return {}; }
  static MOESERVE_INLINE Sums begin(bool is_first, const float* target) { return is_first ? Sums{} : load<W>(target); }
  static MOESERVE_INLINE void end(bool, const Scales&, const TileRows&, int, int64_t, const Sums& sums, float* target) {
    store<W>(target, sums);
  }
};

// A word is one float32.
template <int W>
struct Float32Products : FloatSums<W> {
  static constexpr int kStepInputs = 1;
  static constexpr int kParts = 1;

  template <int kPart>
  static MOESERVE_INLINE Float<W> weights(const char* words, int v) {
    return load<W>(reinterpret_cast<const float*>(words) + v * W);
  }
  template <int kPart>
  static MOESERVE_INLINE Float<W> values(const char* words) {
    return broadcast<W>(*reinterpret_cast<const float*>(words));
  }
};

template <int W>
MOESERVE_INLINE typename Vector<W>::UInt load_words(const char* words) {
  typename Vector<W>::UInt lanes;
  std::memcpy(&lanes, words, sizeof(lanes));
  return lanes;
}

template <int W>
MOESERVE_INLINE typename Vector<W>::UInt broadcast_word(const char* word) {
  return reinterpret_cast<typename Vector<W>::UInt>(broadcast<W>(*reinterpret_cast<const float*>(word)));
}

// A word of the panel is two bfloat16, which are widened to float32: the first by a shift, the second by a mask. Rows
// are float32 already, because widening their words again for each panel would take a third of the time.
template <int W>
struct WidenedProducts : FloatSums<W> {
  static constexpr int kStepInputs = 2;
  static constexpr int kRowBytes = 8;
  static constexpr int kParts = 2;

  template <int kPart>
  static MOESERVE_INLINE Float<W> widen_part(const typename Vector<W>::UInt& words) {
    return reinterpret_cast<Float<W>>(kPart == 0 ? words << 16 : words & 0xFFFF0000u);
  }
  template <int kPart>
  static MOESERVE_INLINE Float<W> weights(const char* words, int v) {
    return widen_part<kPart>(load_words<W>(words + v * W * 4));
  }
  template <int kPart>
  static MOESERVE_INLINE Float<W> values(const char* words) {
    return broadcast<W>(reinterpret_cast<const float*>(words)[kPart]);
  }
};

// Integer sums of a group. They and the correction for the zero points are exact, so results have the same bits with
// every instruction set. A word is four unsigned bytes: weights plus their zero point.
template <int kWidth>
struct IntegerSums {
  static constexpr int W = kWidth;
  static constexpr bool kIsBlock = false;
  static constexpr int kStepInputs = 4;
  static constexpr int kRowBytes = 4;
  static constexpr int kParts = 1;
  using Int = typename Vector<W>::Int;
  using UInt = typename Vector<W>::UInt;
  struct Scales {
    Float<W> scales;
    Float<W> zeros;

    MOESERVE_INLINE Float<W> apply(Float<W> sums, const RowScale& row) const {
      return (sums - zeros * broadcast<W>(row.sum)) * (scales * broadcast<W>(row.scale));
    }
  };

  template <int kPart>
  static MOESERVE_INLINE UInt values(const char* words) {
    return broadcast_word<W>(words);
  }
  static MOESERVE_INLINE Int begin(bool, const float*) { return Int{}; }
  template <typename GroupScales>
  static MOESERVE_INLINE void end(bool is_first, const GroupScales& group, const TileRows& rows, int row, int64_t index,
                                  const Int& sums, float* target) {
    const Float<W> before = is_first && index == 0 ? Float<W>{} : load<W>(target);
    store<W>(target, before + group.apply(__builtin_convertvector(sums, Float<W>), rows.scale(row, index)));
  }
};

// Weights of int8. Their scales are applied at the end of all groups.
template <int W>
struct Int8Weights : IntegerSums<W> {
  static constexpr int kStepBytes = 4 * kPanel;
  static constexpr int64_t kGroupBytes = kInputGroup * kPanel;
  using typename IntegerSums<W>::Scales;
  using typename IntegerSums<W>::UInt;

  template <int kPart>
  static MOESERVE_INLINE UInt weights(const char* words, int v) {
    return load_words<W>(words + v * W * 4);
  }
  static MOESERVE_INLINE Scales scales(const char*, int) {
    return {Float<W>{} + 1.0f, Float<W>{} + static_cast<float>(kByteOffset)};
  }
};

// Weights of Q8_0.
template <int W>
struct Q8Weights : Int8Weights<W> {
  static constexpr int64_t kGroupBytes = kQ8GroupBytes;
  using typename IntegerSums<W>::Scales;

  static MOESERVE_INLINE Scales scales(const char* group, int v) {
    return {load_float16<W>(group + kQ8ScalesAt + v * W * 2), Float<W>{} + static_cast<float>(kByteOffset)};
  }
};

// Weights of int4.
template <int W>
struct Int4Weights : IntegerSums<W> {
  static constexpr int kStepBytes = 2 * kPanel;
  static constexpr int64_t kGroupBytes = kInt4GroupBytes;
  using typename IntegerSums<W>::Scales;
  using typename IntegerSums<W>::UInt;

  template <int kPart>
  static MOESERVE_INLINE UInt weights(const char* words, int v) {
    constexpr int kVectorsOfHalf = kPanel / 2 / W;
    const UInt codes = load_words<W>(words + v % kVectorsOfHalf * W * 4);
    return (v < kVectorsOfHalf ? codes : codes >> 4) & 0x0F0F0F0Fu;
  }
  static MOESERVE_INLINE Scales scales(const char* group, int v) {
    const UInt halves = load_halves<W>(group + kInt4ScalesAt + v * W * 2);
    const Float<W> zeros = load_bytes<W>(group + kInt4ZerosAt + v * W);
    return {reinterpret_cast<Float<W>>(halves << 13) * kFloat16Exponent, (zeros - kInt4ZeroOffset) * kInt4ZeroStep};
  }
};

// The values of E2M1 codes are multiples of 1/2 up to 6. They are multiplied as integers, twice the value.
constexpr int kE2M1Highest = 12;

// Weights of mxfp4, as unsigned bytes like those of int4.
template <int W>
struct Mxfp4Weights : IntegerSums<W> {
  static constexpr int kStepBytes = 2 * kPanel;
  static constexpr int64_t kGroupBytes = kMxfp4GroupBytes;
  static constexpr ByteTable kIntegers{{12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0}};
  using typename IntegerSums<W>::Scales;
  using typename IntegerSums<W>::UInt;

  template <int kPart>
  static MOESERVE_INLINE UInt weights(const char* words, int v) {
    return look_up<W>(kIntegers, Int4Weights<W>::template weights<kPart>(words, v));
  }
  static MOESERVE_INLINE Float<W> powers(const char* group, int v) {
    const auto exponents = __builtin_convertvector(load_bytes<W>(group + kInt4ScalesAt + v * W), UInt);
    return reinterpret_cast<Float<W>>(exponents << 23) * 0.5f;
  }
  static MOESERVE_INLINE Scales scales(const char* group, int v) {
    return {powers(group, v), Float<W>{} + static_cast<float>(kE2M1Highest)};
  }
};

template <typename Products, int kPart>
MOESERVE_INLINE auto weights_of(const char* words, const Block& block, int v) {
  constexpr int W = Products::W;
  return Products::template weights<kPart>(panel_of<W>(words, block, v), v % kPanelVectors<W>);
}

template <typename Products, int kPart, int kRows, int kVectors>
MOESERVE_INLINE void add_part(const char* words, const Block& block, int first_vector, const char* row, int64_t stride,
                              typename Products::Sums (&sums)[kRows][kVectors]) {
  if constexpr (kRows < kVectors) {
    MOESERVE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const auto weights = weights_of<Products, kPart>(words, block, first_vector + v);
      MOESERVE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        Products::add(sums[r][v], weights, Products::template values<kPart>(row + r * stride));
      }
    }
  } else {
    decltype(Products::template weights<kPart>(words, 0)) weights[kVectors];
    MOESERVE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      weights[v] = weights_of<Products, kPart>(words, block, first_vector + v);
    }
    MOESERVE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const auto values = Products::template values<kPart>(row + r * stride);
      MOESERVE_UNROLL
      for (int v = 0; v < kVectors; ++v) Products::add(sums[r][v], weights[v], values);
    }
  }
}

// Multiply kRows rows with kVectors vectors of outputs from `kFirst` on: those of one panel, or all of two.
template <typename Products, int kRows, int kFirst, int kVectors>
MOESERVE_INLINE void multiply_vectors(const TileRows& rows, const Block& block, Prefetch& prefetch, float* sums) {
  constexpr int W = Products::W;
  constexpr int kStepBytes = Products::kStepBytes;
  constexpr bool kHasBoth = kVectors > kPanelVectors<W>;
  const int64_t second_line = kStepBytes > 64 && prefetch.is_fast ? 64 : 0;
  const char* next = prefetch.next;
  const char* group_words = block.words;
  const char* row = rows.words;
  for (int64_t group = 0; group < block.num_groups; ++group) {
    typename Products::Sums lanes[kRows][kVectors];
    MOESERVE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      MOESERVE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        lanes[r][v] = Products::begin(block.is_first, sums + r * kTileOutputs + (kFirst + v) * W);
      }
    }
    const char* words = group_words;
    constexpr int64_t kGroupSteps = Products::kGroupBytes > 0 ? kInputGroup / Products::kStepInputs : 0;
    const int64_t num_steps = kGroupSteps > 0 ? kGroupSteps : block.group_steps;
    for (int64_t step = 0; step < num_steps; ++step) {
      if (next < prefetch.end) {
        prefetch_line<kHasBoth>(next, block);
        if (kStepBytes > 64) prefetch_line<kHasBoth>(next + second_line, block);
        next += 64 + second_line;
      }
      add_part<Products, 0>(words, block, kFirst, row, rows.stride, lanes);
      if constexpr (Products::kParts == 2) {
        asm volatile("" ::: "memory");  // load again: there are not enough registers to keep all words
        add_part<Products, 1>(words, block, kFirst, row, rows.stride, lanes);
      }
      words += kStepBytes;
      row += Products::kRowBytes;
    }
    for (; prefetch.is_fast && words < group_words + Products::kGroupBytes; words += 64, next += 64) {
      prefetch_line<kHasBoth>(next, block);  // the scales
    }
    MOESERVE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const char* of_panel = panel_of<W>(group_words, block, kFirst + v);
      const auto scales = Products::scales(of_panel, (kFirst + v) % kPanelVectors<W>);
      MOESERVE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        float* target = sums + r * kTileOutputs + (kFirst + v) * W;
        Products::end(block.is_first, scales, rows, r, group, lanes[r][v], target);
      }
    }
    group_words += Products::kGroupBytes;
  }
  prefetch.next = next;
}

}  // namespace moeserve
