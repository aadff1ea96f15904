// Products with quantised weights for the instruction sets of x86-64.

#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/block_tile.h"
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

// Unsigned bytes with AVX2 alone: first bytes 0 and 2 of the words, then bytes 1 and 3, as 16-bit integers. Multiplying
// bytes directly (VPMADDUBSW) would saturate.
template <int W, template <int> typename Weights>
struct WidenedByteProducts : Weights<W> {
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

// Return the sums of the products of two 16-bit integers for each output.
template <int W>
MOESERVE_INLINE typename Vector<W>::Int multiply_pairs(const typename Vector<W>::Halves& a,
                                                       const typename Vector<W>::UInt& b) {
  typename Vector<W>::Int sums;
  asm("vpmaddwd %2, %1, %0" : "=v"(sums) : "v"(a), "vm"(b));
  return sums;
}

template <int W>
MOESERVE_INLINE typename Vector<W>::Int load_signed_bytes(const char* source) {
  typedef int8_t Bytes __attribute__((vector_size(W), aligned(1), may_alias));
  typename Vector<W>::Int lanes;
  asm("vpmovsxbd %1, %0" : "=v"(lanes) : "m"(*reinterpret_cast<const Bytes*>(source)));
  return lanes;
}

template <int W>
MOESERVE_INLINE typename Vector<W>::Halves broadcast_quarters(const char* quarters) {
  return reinterpret_cast<typename Vector<W>::Halves>(broadcast_word<W>(quarters));
}

// Weights in blocks with VPDPBUSD. Codes that stand for signed values are multiplied with an offset, and sums begin
// with the correction.
template <int W, WeightFormat kType>
struct BlockDotProducts : BlockWeights<W, kType> {
  using Weights = BlockWeights<W, kType>;
  using typename Weights::Int;
  using typename Weights::UInt;
  static constexpr int kMaxRows = 6;  // with two vectors of sums for each vector of outputs
  static constexpr int kSumSteps = Weights::kScaleSteps;
  static constexpr int kOffset = has_iq4_codes(kType) ? 128 : offset_of_codes(kType);
  static constexpr ByteTable kTable = table_of_iq4(kOffset);
  using Sums = Int;

  static MOESERVE_INLINE UInt weights(const char* group, int step, int v) {
    const UInt codes = Weights::codes(group, step, v);
    return has_iq4_codes(kType) ? look_up<W>(kTable, codes) : codes;
  }
  static MOESERVE_INLINE Sums begin(const char* quarters) {
    if constexpr (kOffset == 0) return Sums{};
    auto sums = broadcast_quarters<W>(quarters);
    if constexpr (kSumSteps == 8) sums += broadcast_quarters<W>(quarters + 4);
    return -multiply_pairs<W>(sums, UInt{} + 0x10001u * kOffset);
  }
  static MOESERVE_INLINE void add(Sums& sums, const UInt& weights, const UInt& values) {
    ByteDotProducts<W, Int8Weights>::add(sums, weights, values);
  }
  static MOESERVE_INLINE Int scales(const char* bytes) { return load_signed_bytes<W>(bytes); }
  static MOESERVE_INLINE Int scaled(const Sums& sums, const Int& scales) { return sums * scales; }
  static MOESERVE_INLINE Int dot_pairs(const typename Vector<W>::Halves& a, const UInt& b) {
    return multiply_pairs<W>(a, b);
  }
};

// Weights in blocks with AVX2 alone. The sums of pairs of products fit in 16 bits for some steps: if codes have an
// offset, modulo 2^16, once the correction is added.
template <int W, WeightFormat kType>
struct BlockPairProducts : BlockWeights<W, kType> {
  using Weights = BlockWeights<W, kType>;
  using typename Weights::Int;
  using typename Weights::UInt;
  static constexpr int kMaxRows = 4;
  static constexpr int kSumSteps = kType == WeightFormat::kQ4_K ? 8 : 4;
  static constexpr int kOffset = offset_of_codes(kType);
  static constexpr int kHighest = kOffset > 0 ? kOffset : (16 << Weights::kLayout.high_bits) - 1;
  static_assert(kSumSteps * 2 * 127 * kHighest <= INT16_MAX);
  using Sums = typename Vector<W>::Halves;

  static MOESERVE_INLINE UInt weights(const char* group, int step, int v) { return Weights::codes(group, step, v); }
  static MOESERVE_INLINE Sums begin(const char* quarters) {
    if constexpr (kOffset == 0) return Sums{};
    return broadcast_quarters<W>(quarters) * static_cast<uint16_t>(-kOffset);
  }
  static MOESERVE_INLINE void add(Sums& sums, const UInt& weights, const UInt& values) {
    Sums products;
    asm("vpmaddubsw %2, %1, %0" : "=x"(products) : "x"(weights), "x"(values));
    sums += products;
  }
  static MOESERVE_INLINE UInt scales(const char* bytes) {
    const auto scales = reinterpret_cast<UInt>(load_signed_bytes<W>(bytes));
    return scales << 16 | (scales & 0xFFFFu);
  }
  static MOESERVE_INLINE Int scaled(const Sums& sums, const UInt& scales) { return multiply_pairs<W>(sums, scales); }
  static MOESERVE_INLINE Int dot_pairs(const Sums& a, const UInt& b) { return multiply_pairs<W>(a, b); }
};

// IQ4_XS and IQ4_NL with AVX2 alone: the sign of a weight is moved to the value. The sums of two products fill 16 bits.
template <int W, WeightFormat kType>
struct SignedBlockProducts : BlockPairProducts<W, kType> {
  using Pairs = BlockPairProducts<W, kType>;
  using typename Pairs::Sums;
  using typename Pairs::UInt;
  static constexpr int kSumSteps = 1;
  static constexpr ByteTable kTable = table_of_iq4(0);
  struct SignedWeights {
    UInt magnitudes;
    UInt signs;
  };

  static MOESERVE_INLINE SignedWeights weights(const char* group, int step, int v) {
    const UInt values = look_up<W>(kTable, Pairs::codes(group, step, v));
    UInt magnitudes;
    asm("vpabsb %1, %0" : "=x"(magnitudes) : "x"(values));
    return {magnitudes, values};
  }
  static MOESERVE_INLINE void add(Sums& sums, const SignedWeights& weights, const UInt& values) {
    UInt signed_values;
    asm("vpsignb %2, %1, %0" : "=x"(signed_values) : "x"(values), "x"(weights.signs));
    Pairs::add(sums, weights.magnitudes, signed_values);
  }
};

// The products of each format with VPDPBUSD, and with AVX2 alone.
template <int W, WeightFormat kFormat>
struct DotTile : BlockDotProducts<W, kFormat> {};
template <int W>
struct DotTile<W, WeightFormat::kInt8> : ByteDotProducts<W, Int8Weights> {};
template <int W>
struct DotTile<W, WeightFormat::kInt4> : ByteDotProducts<W, Int4Weights> {};
template <int W>
struct DotTile<W, WeightFormat::kMxfp4> : ByteDotProducts<W, Mxfp4Weights> {};
template <int W>
struct DotTile<W, WeightFormat::kQ8_0> : ByteDotProducts<W, Q8Weights> {};

template <int W, WeightFormat kFormat>
struct PairTile : BlockPairProducts<W, kFormat> {};
template <int W>
struct PairTile<W, WeightFormat::kInt8> : WidenedByteProducts<W, Int8Weights> {};
template <int W>
struct PairTile<W, WeightFormat::kInt4> : NibbleProducts<W> {};
template <int W>
struct PairTile<W, WeightFormat::kMxfp4> : SignedNibbleProducts<W> {};
template <int W>
struct PairTile<W, WeightFormat::kQ8_0> : WidenedByteProducts<W, Q8Weights> {};
template <int W>
struct PairTile<W, WeightFormat::kIQ4_XS> : SignedBlockProducts<W, WeightFormat::kIQ4_XS> {};
template <int W>
struct PairTile<W, WeightFormat::kIQ4_NL> : SignedBlockProducts<W, WeightFormat::kIQ4_NL> {};

}  // namespace moeserve
