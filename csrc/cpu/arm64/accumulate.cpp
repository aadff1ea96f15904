// Sums of products with the instruction sets of 64-bit ARM.

#include "cpu/accumulate.h"

#include "neon_products.h"

namespace moeserve {

namespace {

void accumulate_neon(const ProductWork& work, float* sums) {
  accumulate<4, WidenedProducts<4>, WidenedTile>(work, sums);
}
MOESERVE_TARGET_NEON_DOT void accumulate_neon_dot(const ProductWork& work, float* sums) {
  accumulate<4, WidenedProducts<4>, DotTile>(work, sums);
}
MOESERVE_TARGET_NEON_BF16 void accumulate_neon_bf16(const ProductWork& work, float* sums) {
  accumulate<4, BFloat16DotProducts<4>, DotTile>(work, sums);
}

}  // namespace

Accumulate choose_accumulate(Isa isa) {
  switch (isa) {
    case Isa::kNeon:
      return accumulate_neon;
    case Isa::kNeonDot:
      return accumulate_neon_dot;
    case Isa::kNeonBf16:
      break;
  }
  return accumulate_neon_bf16;
}

bool widens_rows(WeightFormat format, Isa isa) {
  return traits_of(format).rows == RowForm::kBFloat16 && isa != Isa::kNeonBf16;
}

}  // namespace moeserve
