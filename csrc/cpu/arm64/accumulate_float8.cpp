// Sums of products with weights in FP8 with the instruction sets of 64-bit ARM.

#include "cpu/accumulate_float8.h"

#include "neon_products.h"

namespace moeserve {

namespace {

void multiply_neon(const ProductWork& work, float* sums) { multiply_few_rows<WidenedProducts<4>>(work, sums); }
MOESERVE_TARGET_NEON_BF16 void multiply_neon_bf16(const ProductWork& work, float* sums) {
  multiply_few_rows<BFloat16DotProducts<4>>(work, sums);
}

template <Isa kIsa>
void accumulate_float8(const ProductWork& work, float* sums) {
  if (work.num_rows > kFewFloat8Rows) return decode_and_multiply<4>(work, kIsa, sums);
  return (kIsa == Isa::kNeonBf16 ? multiply_neon_bf16 : multiply_neon)(work, sums);
}

}  // namespace

Accumulate choose_accumulate_float8(Isa isa) {
  switch (isa) {
    case Isa::kNeon:
      return accumulate_float8<Isa::kNeon>;
    case Isa::kNeonDot:
      return accumulate_float8<Isa::kNeonDot>;
    case Isa::kNeonBf16:
      break;
  }
  return accumulate_float8<Isa::kNeonBf16>;
}

}  // namespace moeserve
