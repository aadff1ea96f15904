// Multiply-adds on registers with the instruction sets of 64-bit ARM.

#include "cpu/limit_probe.h"

#include "neon_products.h"

namespace moeserve {

namespace {

using Words = Vector<4>::UInt;

int64_t floats_neon() { return multiply_ones<FloatSums<4>, Float<4>>(kFloatOne); }
int64_t bytes_neon() { return multiply_ones<WidenedByteProducts<4, SignedInt8Weights>, Words>(kByteOnes); }
MOESERVE_TARGET_NEON_DOT int64_t bytes_neon_dot() {
  return multiply_ones<ByteDotProducts<4, SignedInt8Weights>, Words>(kByteOnes);
}
MOESERVE_TARGET_NEON_BF16 int64_t pairs_neon_bf16() {
  return multiply_ones<BFloat16DotProducts<4>, Words>(kBFloat16Ones);
}

}  // namespace

MultiplyOnes choose_multiply_ones(Isa isa, WeightFormat format) {
  if (format == WeightFormat::kInt8) return isa >= Isa::kNeonDot ? bytes_neon_dot : bytes_neon;
  if (format == WeightFormat::kBFloat16 && isa == Isa::kNeonBf16) return pairs_neon_bf16;
  return floats_neon;
}

}  // namespace moeserve
