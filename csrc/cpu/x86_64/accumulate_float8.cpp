// Sums of products with weights in FP8 with the instruction sets of x86-64.

#include "cpu/accumulate_float8.h"

namespace moeserve {

namespace {

// A word is two bfloat16, whose products VDPBF16PS adds.
struct DotPairs {
  static constexpr int W = 16;
  static constexpr int kParts = 1;
  using UInt = Vector<W>::UInt;

  static constexpr int kRowBytes = 4;
  template <int kPart>
  static MOESERVE_INLINE UInt values(const char* words) {
    return broadcast_word<W>(words);
  }
  static MOESERVE_INLINE void add(Float<W>& sums, const UInt& weights, const UInt& values) {
    Float<W> added = sums;
    asm("vdpbf16ps %2, %1, %0" : "+v"(added) : "v"(values), "v"(weights));
    sums = added;
  }
};

MOESERVE_TARGET_AVX2 void decode_avx2(const ProductWork& work, Isa isa, float* sums) {
  decode_and_multiply<8>(work, isa, sums);
}
MOESERVE_TARGET_AVX512 void decode_avx512(const ProductWork& work, Isa isa, float* sums) {
  decode_and_multiply<16>(work, isa, sums);
}

MOESERVE_TARGET_AVX2 void multiply_avx2(const ProductWork& work, float* sums) {
  multiply_few_rows<WidenedProducts<8>>(work, sums);
}
MOESERVE_TARGET_AVX512 void multiply_avx512(const ProductWork& work, float* sums) {
  multiply_few_rows<WidenedProducts<16>>(work, sums);
}
MOESERVE_TARGET_AVX512_BF16 void multiply_avx512_bf16(const ProductWork& work, float* sums) {
  multiply_few_rows<DotPairs>(work, sums);
}

template <Isa kIsa>
void accumulate_float8(const ProductWork& work, float* sums) {
  constexpr bool kIsWide = kIsa >= Isa::kAvx512;
  if (work.num_rows > kFewFloat8Rows || kIsa == Isa::kAmx) {
    return (kIsWide ? decode_avx512 : decode_avx2)(work, kIsa, sums);
  }
  return (kIsa == Isa::kAvx512Bf16 ? multiply_avx512_bf16 : kIsWide ? multiply_avx512 : multiply_avx2)(work, sums);
}

}  // namespace

Accumulate choose_accumulate_float8(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return accumulate_float8<Isa::kAvx2>;
    case Isa::kAvx2Vnni:
      return accumulate_float8<Isa::kAvx2Vnni>;
    case Isa::kAvx512:
      return accumulate_float8<Isa::kAvx512>;
    case Isa::kAvx512Bf16:
      return accumulate_float8<Isa::kAvx512Bf16>;
    case Isa::kAmx:
      break;
  }
  return accumulate_float8<Isa::kAmx>;
}

}  // namespace moeserve
