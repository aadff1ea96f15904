// Products with quantised weights for the instruction sets of x86-64.

#pragma once

#include <cstdint>

#include "cpu/product_tile.h"

namespace moeserve {

// VPDPBUSD, which adds four products of unsigned and signed bytes.
template <int W, template <int> typename Weights>
struct ByteDotProducts : Weights<W> {
  static constexpr int kMaxRows = W == 16 ? 12 : 6;
  using Sums = typename Vector<W>::Int;
  using UInt = typename Vector<W>::UInt;

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

// int8 with AVX2 alone: bytes 0 and 2 of the words, then 1 and 3, as 16-bit integers. Multiplying bytes directly
// (VPMADDUBSW) would saturate.
template <int W>
struct WidenedByteProducts : Int8Weights<W> {
  static constexpr int kMaxRows = 4;
  static constexpr int kRowBytes = 8;
  static constexpr int kParts = 2;
  using Sums = typename Vector<W>::Int;
  using UInt = typename Vector<W>::UInt;

  template <int kPart>
  static MOESERVE_INLINE UInt weights(const char* words, int v) {
    using Halves = typename Vector<W>::Halves;
    const auto halves = reinterpret_cast<Halves>(load_words<W>(words + v * W * 4));
    return reinterpret_cast<UInt>(kPart == 0 ? halves & 0xFF : halves >> 8);
  }
  template <int kPart>
  static MOESERVE_INLINE UInt values(const char* words) {
    return broadcast_word<W>(words + 4 * kPart);
  }
  static MOESERVE_INLINE void add(Sums& sums, const UInt& weights, const UInt& values) {
    Sums products;
    asm("vpmaddwd %2, %1, %0" : "=x"(products) : "x"(weights), "x"(values));
    sums += products;
  }
};

// int4 with AVX2 alone: the sums of pairs of products fit in 16 bits for all inputs of a group.
template <int W>
struct NibbleProducts : Int4Weights<W> {
  static constexpr int kMaxRows = 6;
  static_assert(kInputGroup / 2 * 15 * 127 <= INT16_MAX);
  using Sums = typename Vector<W>::Halves;
  using UInt = typename Vector<W>::UInt;
  using typename Int4Weights<W>::Scales;

  static MOESERVE_INLINE void add(Sums& sums, const UInt& weights, const UInt& values) {
    Sums products;
    asm("vpmaddubsw %2, %1, %0" : "=x"(products) : "x"(weights), "x"(values));
    sums += products;
  }
  static MOESERVE_INLINE Sums begin(bool, const float*) { return Sums{}; }
  static MOESERVE_INLINE void end(bool is_first, const Scales& group, const TileRows& rows, int row, int64_t index,
                                  const Sums& sums, float* target) {
    const Sums ones = Sums{} + 1;
    typename Vector<W>::Int added;
    asm("vpmaddwd %2, %1, %0" : "=x"(added) : "x"(sums), "x"(ones));
    IntegerSums<W>::end(is_first, group, rows, row, index, added, target);
  }
};

}  // namespace moeserve
