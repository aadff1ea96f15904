// Products with quantised weights for the instruction sets of x86-64.

#pragma once

#include <cstdint>

#include "cpu/product_tile.h"

namespace moeserve {

// Products with VPDPBUSD, which adds four products of unsigned and signed bytes.
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

// int8 with AVX2 alone: first bytes 0 and 2 of the words, then bytes 1 and 3, as 16-bit integers. Multiplying bytes
// directly (VPMADDUBSW) would saturate.
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
template <int W, typename Weights = Int4Weights<W>>
struct NibbleProducts : Weights {
  static constexpr int kMaxRows = 6;
  static_assert(kInputGroup / 2 * 15 * 127 <= INT16_MAX);
  using Sums = typename Vector<W>::Halves;
  using UInt = typename Vector<W>::UInt;

  static MOESERVE_INLINE void add(Sums& sums, const UInt& weights, const UInt& values) {
    Sums products;
    asm("vpmaddubsw %2, %1, %0" : "=x"(products) : "x"(weights), "x"(values));
    sums += products;
  }
  static MOESERVE_INLINE Sums begin(bool, const float*) { return Sums{}; }
  template <typename GroupScales>
  static MOESERVE_INLINE void end(bool is_first, const GroupScales& group, const TileRows& rows, int row, int64_t index,
                                  const Sums& sums, float* target) {
    const Sums ones = Sums{} + 1;
    typename Vector<W>::Int added;
    asm("vpmaddwd %2, %1, %0" : "=x"(added) : "x"(sums), "x"(ones));
    IntegerSums<W>::end(is_first, group, rows, row, index, added, target);
  }
};

// mxfp4 with AVX2 alone: like int4, but the sign of a weight is moved to the value, because sums of products with
// unsigned weights of up to 24 would not fit in 16 bits.
template <int W>
struct SignedNibbleProducts : NibbleProducts<W, Mxfp4Weights<W>> {
  static constexpr int kMaxRows = 4;
  static_assert(kInputGroup / 2 * kE2M1Highest * 127 <= INT16_MAX);
  static constexpr ByteTable kMagnitudes{{0, 1, 2, 3, 4, 6, 8, 12, 0, 1, 2, 3, 4, 6, 8, 12}};
  static constexpr ByteTable kSigns{{1, 1, 1, 1, 1, 1, 1, 1, 255, 255, 255, 255, 255, 255, 255, 255}};
  using Sums = typename NibbleProducts<W, Mxfp4Weights<W>>::Sums;
  using UInt = typename Vector<W>::UInt;
  struct SignedWeights {
    UInt magnitudes;
    UInt signs;
  };
  struct Scales {
    Float<W> scales;

    MOESERVE_INLINE Float<W> apply(Float<W> sums, const RowScale& row) const {
      return sums * (scales * broadcast<W>(row.scale));
    }
  };

  template <int kPart>
  static MOESERVE_INLINE SignedWeights weights(const char* words, int v) {
    const UInt codes = Int4Weights<W>::template weights<kPart>(words, v);
    return {look_up<W>(kMagnitudes, codes), look_up<W>(kSigns, codes)};
  }
  static MOESERVE_INLINE void add(Sums& sums, const SignedWeights& weights, const UInt& values) {
    UInt signed_values;
    asm("vpsignb %2, %1, %0" : "=x"(signed_values) : "x"(values), "x"(weights.signs));
    NibbleProducts<W, Mxfp4Weights<W>>::add(sums, weights.magnitudes, signed_values);
  }
  static MOESERVE_INLINE Scales scales(const char* group, int v) { return {Mxfp4Weights<W>::powers(group, v)}; }
};

}  // namespace moeserve
