// Products with bfloat16 and quantised weights for the instruction sets of 64-bit ARM.

#pragma once

#include <cstdint>

#include "cpu/product_tile.h"

// Sums are copied before and after the assembly, because GCC would otherwise keep some sums of an array in memory.

namespace moeserve {

// Add both products of pairs of bfloat16 to sums in float32, with BFDOT, which treats subnormal numbers as zero.
template <typename Words>
MOESERVE_INLINE void add_dot_of_pairs(Float<4>& sums, const Words& a, const Words& b) {
  Float<4> added = sums;
  asm("bfdot %0.4s, %1.8h, %2.8h" : "+w"(added) : "w"(a), "w"(b));
  sums = added;
}

// A word is two bfloat16.
template <int W>
struct BFloat16DotProducts : FloatSums<W> {
  static constexpr int kMaxRows = 6;
  static constexpr int kStepInputs = 2;
  static constexpr int kParts = 1;
  using UInt = typename Vector<W>::UInt;

  template <int kPart>
  static MOESERVE_INLINE UInt weights(const char* words, int v) {
    return load_words<W>(words + v * W * 4);
  }
  template <int kPart>
  static MOESERVE_INLINE UInt values(const char* words) {
    return broadcast_word<W>(words);
  }
  static MOESERVE_INLINE void add(Float<W>& sums, const UInt& weights, const UInt& values) {
    add_dot_of_pairs(sums, weights, values);
  }
};

// Weights of int8 as signed bytes, so that sums need no correction.
template <int W>
struct SignedInt8Weights : Int8Weights<W> {
  using typename Int8Weights<W>::UInt;
  struct Scales {
    MOESERVE_INLINE Float<W> apply(Float<W> sums, const RowScale& row) const { return sums * broadcast<W>(row.scale); }
  };

  template <int kPart>
  static MOESERVE_INLINE UInt weights(const char* words, int v) {
    return Int8Weights<W>::template weights<kPart>(words, v) ^ 0x80808080u;
  }
  static MOESERVE_INLINE Scales scales(const char*, int) { return {}; }
};

// Products with SDOT, which adds four products of signed bytes.
template <int W, template <int> typename Weights>
struct ByteDotProducts : Weights<W> {
  static constexpr int kMaxRows = 5;
  using Sums = typename Vector<W>::Int;
  using UInt = typename Vector<W>::UInt;

  static MOESERVE_INLINE void add(Sums& sums, const UInt& weights, const UInt& values) {
    Sums added = sums;
    asm("sdot %0.4s, %1.16b, %2.16b" : "+w"(added) : "w"(weights), "w"(values));
    sums = added;
  }
};

// Products with NEON alone: signed bytes are multiplied to 16 bits, where sums of pairs fit, and added to 32-bit sums.
template <int W, template <int> typename Weights>
struct WidenedByteProducts : Weights<W> {
  static constexpr int kMaxRows = 4;
  using Sums = typename Vector<W>::Int;
  using UInt = typename Vector<W>::UInt;

  static MOESERVE_INLINE void add(Sums& sums, const UInt& weights, const UInt& values) {
    Sums added = sums;
    UInt low, high, pairs;
    asm("smull %0.8h, %1.8b, %2.8b" : "=w"(low) : "w"(weights), "w"(values));
    asm("smull2 %0.8h, %1.16b, %2.16b" : "=w"(high) : "w"(weights), "w"(values));
    asm("addp %0.8h, %1.8h, %2.8h" : "=w"(pairs) : "w"(low), "w"(high));
    asm("sadalp %0.4s, %1.8h" : "+w"(added) : "w"(pairs));
    sums = added;
  }
};

}  // namespace moeserve
