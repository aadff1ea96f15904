// The inner loops of products: a few rows times the 32 outputs of a panel, for vectors of any width.
//
// A tile processes inputs in steps: a step multiplies the words of a row with a vector of words of the panel, one word
// for each output. The steps of a sum are in the order of K, which alone determines its bits.

#pragma once

#include <cstdint>

#include "lanes.h"
#include "packed_weight.h"
#include "quantized_rows.h"

namespace moeserve {

constexpr int kTileOutputs = 2 * kPanel;  // sums of a row side by side: those of two panels

// Some inputs of a panel.
struct Block {
  const char* words;
  const float* scales;  // [groups, kPanel] of quantised weights
  const float* zeros;   // [groups, kPanel]: words of quantised weights are more than the weights by this
  int64_t num_groups;   // of inputs whose sums are scaled together
  int64_t group_steps;
  bool is_first;         // overwrite the sums instead of adding to them
  const char* prefetch;  // memory to read into the cache at the speed of the words; null for none
};

// A part of the sums of a tile: one group of inputs, one row, and one vector of outputs.
struct Part {
  int64_t group;
  int row;
  int output;
};

// Some rows, from the first input of a block on.
struct TileRows {
  const char* words;
  const char* scales;  // RowScale of a quantised row
  int64_t stride;      // bytes from row to row, of both

  const RowScale& scale(const Part& part) const {
    return reinterpret_cast<const RowScale*>(scales + part.row * stride)[part.group];
  }
};

// Products are described by classes with:
//   W            lanes of a vector
//   kMaxRows     rows of a tile whose sums fit in the registers
//   kWordBytes   of the panel, for one output in one step
//   kRowBytes    of a row, in one step
//   kParts       a step consists of this many multiply-adds of vectors
//   Sums         a vector of sums
//   weights      one part of a vector of words
//   values       one part of a row's words, in all lanes
//   add          add weights times values to sums
//   begin, end   begin the sums of a group of inputs, and add them to those of the groups before it

// Sums in float32, which continue from block to block.
template <int kWidth>
struct FloatSums {
  static constexpr int W = kWidth;
  static constexpr int kMaxRows = W == 16 ? 12 : 6;
  using Sums = Float<W>;

  static MOESERVE_INLINE void add(Sums& sums, const Float<W>& weights, const Float<W>& values) {
    sums += weights * values;
  }
  static MOESERVE_INLINE Sums begin(const Block& block, const TileRows&, const Part&, const float* target) {
    return block.is_first ? Sums{} : load<W>(target);
  }
  static MOESERVE_INLINE void end(const Block&, const TileRows&, const Part&, const Sums& sums, float* target) {
    store<W>(target, sums);
  }
};

// A word is one float32.
template <int W>
struct Float32Products : FloatSums<W> {
  static constexpr int kWordBytes = 4;
  static constexpr int kRowBytes = 4;
  static constexpr int kParts = 1;

  template <int kPart>
  static MOESERVE_INLINE Float<W> weights(const char* words) {
    return load<W>(reinterpret_cast<const float*>(words));
  }
  template <int kPart>
  static MOESERVE_INLINE Float<W> values(const char* words) {
    return broadcast<W>(*reinterpret_cast<const float*>(words));
  }
};

// A word is two bfloat16, which are widened to float32: the first by a shift, the second by a mask.
template <int W>
struct WidenedProducts : FloatSums<W> {
  using UInt = typename Vector<W>::UInt;
  static constexpr int kWordBytes = 4;
  static constexpr int kRowBytes = 4;
  static constexpr int kParts = 2;

  template <int kPart>
  static MOESERVE_INLINE Float<W> widen_part(const UInt& words) {
    return reinterpret_cast<Float<W>>(kPart == 0 ? words << 16 : words & 0xFFFF0000u);
  }
  template <int kPart>
  static MOESERVE_INLINE Float<W> weights(const char* words) {
    UInt lanes;
    std::memcpy(&lanes, words, sizeof(lanes));
    return widen_part<kPart>(lanes);
  }
  template <int kPart>
  static MOESERVE_INLINE Float<W> values(const char* words) {
    return widen_part<kPart>(reinterpret_cast<UInt>(broadcast<W>(*reinterpret_cast<const float*>(words))));
  }
};

// Sums in int32, which are exact, so a block's sum has the same bits with every instruction set. A word is four
// unsigned bytes, 128 more than the weights. `RowScale::start` removes that excess.
template <int kWidth>
struct IntegerSums {
  static constexpr int W = kWidth;
  static constexpr int kWordBytes = 4;
  using Sums = typename Vector<W>::Int;
  using UInt = typename Vector<W>::UInt;

  static MOESERVE_INLINE UInt load_words(const char* words) {
    UInt lanes;
    std::memcpy(&lanes, words, sizeof(lanes));
    return lanes;
  }
  static MOESERVE_INLINE UInt broadcast_word(const char* word) {
    return reinterpret_cast<UInt>(broadcast<W>(*reinterpret_cast<const float*>(word)));
  }
  static MOESERVE_INLINE Sums begin(const Block&, const TileRows&, const Part&, const float*) { return Sums{}; }
  static MOESERVE_INLINE void end(const Block& block, const TileRows& rows, const Part& part, const Sums& sums,
                                  float* target) {
    const RowScale& row = rows.scale(part);
    const int64_t place = part.group * kPanel + part.output;
    const Float<W> excess = load<W>(block.zeros + place) * broadcast<W>(row.sum);
    const Float<W> scales = load<W>(block.scales + place) * broadcast<W>(row.scale);
    const Float<W> before = block.is_first && part.group == 0 ? Float<W>{} : load<W>(target);
    store<W>(target, before + (__builtin_convertvector(sums, Float<W>) - excess) * scales);
  }
};

// VPDPBUSD, which adds four products of unsigned and signed bytes.
template <int W>
struct ByteDotProducts : IntegerSums<W> {
  static constexpr int kMaxRows = W == 16 ? 12 : 6;
  static constexpr int kRowBytes = 4;
  static constexpr int kParts = 1;
  using typename IntegerSums<W>::Sums;
  using typename IntegerSums<W>::UInt;

  template <int kPart>
  static MOESERVE_INLINE UInt weights(const char* words) {
    return IntegerSums<W>::load_words(words);
  }
  template <int kPart>
  static MOESERVE_INLINE UInt values(const char* words) {
    return IntegerSums<W>::broadcast_word(words);
  }
  static MOESERVE_INLINE void add(Sums& sums, const UInt& weights, const UInt& values) {
    Sums added = sums;
    if constexpr (W == 16) {
      asm("vpdpbusd %2, %1, %0" : "+v"(added) : "v"(weights), "v"(values));
    } else {
      asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(added) : "x"(weights), "x"(values));
    }
    sums = added;
  }
};

// The same with AVX2 alone: bytes 0 and 2 of the words, then 1 and 3, as 16-bit integers. Multiplying bytes directly
// (VPMADDUBSW) would saturate.
template <int W>
struct WidenedByteProducts : IntegerSums<W> {
  static constexpr int kMaxRows = 4;
  static constexpr int kRowBytes = 8;
  static constexpr int kParts = 2;
  using typename IntegerSums<W>::Sums;
  using typename IntegerSums<W>::UInt;

  template <int kPart>
  static MOESERVE_INLINE UInt weights(const char* words) {
    using Halves = typename Vector<W>::Halves;
    const auto halves = reinterpret_cast<Halves>(IntegerSums<W>::load_words(words));
    return reinterpret_cast<UInt>(kPart == 0 ? halves & 0xFF : halves >> 8);
  }
  template <int kPart>
  static MOESERVE_INLINE UInt values(const char* words) {
    return IntegerSums<W>::broadcast_word(words + 4 * kPart);
  }
  static MOESERVE_INLINE void add(Sums& sums, const UInt& weights, const UInt& values) {
    Sums products;
    asm("vpmaddwd %2, %1, %0" : "=x"(products) : "x"(weights), "x"(values));
    sums += products;
  }
};

template <typename Products, int kPart, int kRows, int kVectors>
MOESERVE_INLINE void add_part(const char* words, const char* row, int64_t stride,
                              typename Products::Sums (&sums)[kRows][kVectors]) {
  constexpr int64_t kVectorBytes = Products::W * Products::kWordBytes;
  if constexpr (kRows < kVectors) {
    MOESERVE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const auto weights = Products::template weights<kPart>(words + v * kVectorBytes);
      MOESERVE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        Products::add(sums[r][v], weights, Products::template values<kPart>(row + r * stride));
      }
    }
  } else {
    decltype(Products::template weights<kPart>(words)) weights[kVectors];
    MOESERVE_UNROLL
    for (int v = 0; v < kVectors; ++v) weights[v] = Products::template weights<kPart>(words + v * kVectorBytes);
    MOESERVE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const auto values = Products::template values<kPart>(row + r * stride);
      MOESERVE_UNROLL
      for (int v = 0; v < kVectors; ++v) Products::add(sums[r][v], weights[v], values);
    }
  }
}

// Multiply kRows rows with kVectors vectors of outputs from `output` on.
template <typename Products, int kRows, int kVectors, bool kPrefetches>
MOESERVE_INLINE void multiply_outputs(const TileRows& rows, const Block& block, int output, float* sums) {
  constexpr int W = Products::W;
  constexpr int64_t kStepBytes = kPanel * Products::kWordBytes;
  const char* words = block.words + output * Products::kWordBytes;
  const char* prefetch = block.prefetch;
  const char* row = rows.words;
  for (int64_t group = 0; group < block.num_groups; ++group) {
    typename Products::Sums lanes[kRows][kVectors];
    MOESERVE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      MOESERVE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const Part part{group, r, output + v * W};
        lanes[r][v] = Products::begin(block, rows, part, sums + r * kTileOutputs + part.output);
      }
    }
    for (int64_t step = 0; step < block.group_steps; ++step) {
      if constexpr (kPrefetches) {
        MOESERVE_UNROLL
        for (int64_t byte = 0; byte < kStepBytes; byte += 64) __builtin_prefetch(prefetch + byte);
        prefetch += kStepBytes;
      }
      add_part<Products, 0>(words, row, rows.stride, lanes);
      if constexpr (Products::kParts == 2) {
        asm volatile("" ::: "memory");  // load again: there are not enough registers to keep all words
        add_part<Products, 1>(words, row, rows.stride, lanes);
      }
      words += kStepBytes;
      row += Products::kRowBytes;
    }
    MOESERVE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      MOESERVE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const Part part{group, r, output + v * W};
        Products::end(block, rows, part, lanes[r][v], sums + r * kTileOutputs + part.output);
      }
    }
  }
}

// Multiply `num_rows` <= kRows rows with the 32 outputs of a panel.
template <typename Products, int kRows = Products::kMaxRows>
MOESERVE_INLINE void multiply_tile(const TileRows& rows, int num_rows, const Block& block, float* sums) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) return multiply_tile<Products, kRows - 1>(rows, num_rows, block, sums);
  }
  constexpr int kVectors = Products::W == 16 || kRows > 2 ? 2 : 4;
  for (int output = 0; output < kPanel; output += kVectors * Products::W) {
    if (block.prefetch != nullptr && output == 0) {
      multiply_outputs<Products, kRows, kVectors, true>(rows, block, output, sums);
    } else {
      multiply_outputs<Products, kRows, kVectors, false>(rows, block, output, sums);
    }
  }
}

}  // namespace moeserve
