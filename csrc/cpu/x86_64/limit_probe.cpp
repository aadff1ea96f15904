// Multiply-adds on registers with the instruction sets of x86-64.

#include "cpu/limit_probe.h"

#include <algorithm>
#include <iterator>
#include <numeric>

#include "amx_tiles.h"
#include "byte_products.h"

namespace moeserve {

namespace {

// VDPBF16PS.
struct PairDots : FloatSums<16> {
  using UInt = Vector<16>::UInt;

  static MOESERVE_INLINE void add(Sums& sums, const UInt& weights, const UInt& values) {
    Sums added = sums;
    asm("vdpbf16ps %2, %1, %0" : "+v"(added) : "v"(weights), "v"(values));
    sums = added;
  }
};

template <int W>
using Words = typename Vector<W>::UInt;

MOESERVE_TARGET_AVX2 int64_t floats_avx2() { return multiply_ones<FloatSums<8>, Float<8>>(kFloatOne); }
MOESERVE_TARGET_AVX2 int64_t bytes_avx2() { return multiply_ones<NibbleProducts<8>, Words<8>>(kByteOnes); }
MOESERVE_TARGET_AVX2 int64_t bytes_avx2_vnni() {
  return multiply_ones<ByteDotProducts<8, Int8Weights>, Words<8>>(kByteOnes);
}
MOESERVE_TARGET_AVX512 int64_t floats_avx512() { return multiply_ones<FloatSums<16>, Float<16>>(kFloatOne); }
MOESERVE_TARGET_AVX512 int64_t pairs_avx512_bf16() { return multiply_ones<PairDots, Words<16>>(kBFloat16Ones); }
MOESERVE_TARGET_AVX512 int64_t bytes_avx512() {
  return multiply_ones<ByteDotProducts<16, Int8Weights>, Words<16>>(kByteOnes);
}

int64_t pairs_amx() {
  alignas(64) uint32_t ones[kAmxRows * 16];
  alignas(64) float sums[kAmxRows * 16];
  std::fill(std::begin(ones), std::end(ones), kBFloat16Ones);
  TileSizes(kAmxRows, kAmxInputs).use();  // clears all tiles
  MOESERVE_TILE_LOAD(4, ones, 64);
  MOESERVE_TILE_LOAD(5, ones, 64);
  for (int64_t step = 0; step < kProbeSteps / 4; ++step) {
    MOESERVE_TILE_DOT(0, 4, 5);
    MOESERVE_TILE_DOT(1, 4, 5);
    MOESERVE_TILE_DOT(2, 4, 5);
    MOESERVE_TILE_DOT(3, 4, 5);
  }
  MOESERVE_TILE_STORE(0, sums, 64);
  release_tiles();
  return 4 * std::accumulate(std::begin(sums), std::end(sums), int64_t{0});
}

}  // namespace

MultiplyOnes choose_multiply_ones(Isa isa, WeightFormat format) {
  if (format == WeightFormat::kInt8) {
    return isa >= Isa::kAvx512 ? bytes_avx512 : isa == Isa::kAvx2Vnni ? bytes_avx2_vnni : bytes_avx2;
  }
  if (format == WeightFormat::kBFloat16 && isa >= Isa::kAvx512Bf16) {
    return isa == Isa::kAmx ? pairs_amx : pairs_avx512_bf16;
  }
  return isa >= Isa::kAvx512 ? floats_avx512 : floats_avx2;
}

}  // namespace moeserve
