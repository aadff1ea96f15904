// Products with bfloat16 and quantised weights for the instruction sets of 64-bit ARM.

#pragma once

#include <cstdint>

#include "cpu/block_tile.h"
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

// Weights of Q8_0 as signed bytes.
template <int W>
struct SignedQ8Weights : SignedInt8Weights<W> {
  static constexpr int64_t kGroupBytes = kQ8GroupBytes;
  struct Scales {
    Float<W> scales;

    MOESERVE_INLINE Float<W> apply(Float<W> sums, const RowScale& row) const {
      return sums * (scales * broadcast<W>(row.scale));
    }
  };

  static MOESERVE_INLINE Scales scales(const char* group, int v) {
    return {load_float16<W>(group + kQ8ScalesAt + v * W * 2)};
  }
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

// Weights in blocks as signed bytes. `Dot` adds the products of bytes to 32-bit sums.
template <int W, WeightFormat kType, typename Dot>
struct SignedBlockProducts : BlockWeights<W, kType> {
  using Weights = BlockWeights<W, kType>;
  using typename Weights::Int;
  using typename Weights::UInt;
  static constexpr int kMaxRows = Dot::kMaxRows;
  static constexpr int kSumSteps = Weights::kScaleSteps;
  static constexpr ByteTable kTable = table_of_iq4(0);
  using Sums = Int;

  static MOESERVE_INLINE UInt weights(const char* group, int step, int v) {
    const UInt codes = Weights::codes(group, step, v);
    if constexpr (has_iq4_codes(kType)) return look_up<W>(kTable, codes);
    if constexpr (offset_of_codes(kType) == 0) return codes;
    typedef int8_t Bytes __attribute__((vector_size(W * 4)));
    return reinterpret_cast<UInt>(reinterpret_cast<Bytes>(codes) - offset_of_codes(kType));
  }
  static MOESERVE_INLINE Sums begin(const char*) { return Sums{}; }
  static MOESERVE_INLINE void add(Sums& sums, const UInt& weights, const UInt& values) {
    Dot::add(sums, weights, values);
  }
  static MOESERVE_INLINE Int scales(const char* bytes) {
    return Int{static_cast<int8_t>(bytes[0]), static_cast<int8_t>(bytes[1]), static_cast<int8_t>(bytes[2]),
               static_cast<int8_t>(bytes[3])};
  }
  static MOESERVE_INLINE Int scaled(const Sums& sums, const Int& scales) { return sums * scales; }
  static MOESERVE_INLINE Int dot_pairs(const typename Vector<W>::Halves& a, const UInt& b) {
    const auto first = reinterpret_cast<Int>(a), second = reinterpret_cast<Int>(b);
    return (first << 16 >> 16) * (second << 16 >> 16) + (first >> 16) * (second >> 16);
  }
};

// The products of each quantised format by `Dot`.
template <int W, WeightFormat kFormat, template <int, template <int> typename> typename Dot>
struct QuantizedTile : SignedBlockProducts<W, kFormat, Dot<W, SignedInt8Weights>> {};
template <int W, template <int, template <int> typename> typename Dot>
struct QuantizedTile<W, WeightFormat::kInt8, Dot> : Dot<W, SignedInt8Weights> {};
template <int W, template <int, template <int> typename> typename Dot>
struct QuantizedTile<W, WeightFormat::kInt4, Dot> : Dot<W, Int4Weights> {};
template <int W, template <int, template <int> typename> typename Dot>
struct QuantizedTile<W, WeightFormat::kMxfp4, Dot> : Dot<W, Mxfp4Weights> {};
template <int W, template <int, template <int> typename> typename Dot>
struct QuantizedTile<W, WeightFormat::kQ8_0, Dot> : Dot<W, SignedQ8Weights> {};

template <int W, WeightFormat kFormat>
using WidenedTile = QuantizedTile<W, kFormat, WidenedByteProducts>;
template <int W, WeightFormat kFormat>
using DotTile = QuantizedTile<W, kFormat, ByteDotProducts>;

}  // namespace moeserve
