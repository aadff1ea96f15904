// The kernels of attention for the instruction sets of 64-bit ARM.

#include "cpu/attention_block.h"

#include "cpu/attention_kernels.h"
#include "cpu/products.h"
#include "neon_products.h"

namespace moeserve {

namespace {

// A word is two bfloat16, the first in its low half. Only for functions with MOESERVE_TARGET_NEON_BF16.
struct BFloat16Products {
  static constexpr int W = 4;
  static constexpr int kPerWord = 2;
  static constexpr int kVectors = 4;
  static constexpr int kExponentialDegree = 4;
  static constexpr int kStepGroup = 1;
  using Word = uint32_t;
  using Words = Vector<4>::UInt;

  static MOESERVE_INLINE Words load_words(const Word* source) {
    Words words;
    std::memcpy(&words, source, sizeof(words));
    return words;
  }
  static MOESERVE_INLINE Words broadcast_word(const Word* source) { return Words{*source, *source, *source, *source}; }
  static MOESERVE_INLINE Words ones() { return Words{} + 0x3F803F80u; }

  // Round 8 floats to nearest, in order.
  static MOESERVE_INLINE Words pack(const Float<W>* vectors) {
    Words words;
    asm("bfcvtn %0.4h, %1.4s\n\t"
        "bfcvtn2 %0.8h, %2.4s"
        : "=&w"(words)
        : "w"(vectors[0]), "w"(vectors[1]));
    return words;
  }
  static MOESERVE_INLINE void add(Float<W>& sums, const Words& a, const Words& b) { add_dot_of_pairs(sums, a, b); }
};

MOESERVE_BLOCK_KERNELS(NeonBFloat16, MOESERVE_TARGET_NEON_BF16);
MOESERVE_BLOCK_KERNELS(Neon, );

}  // namespace

const BlockKernels& choose_block_kernels(Isa isa, ElementType type) {
  if (type != ElementType::kBFloat16) return Neon<FloatProducts<4>, float>::kernels;
  if (isa < Isa::kNeonBf16) return Neon<FloatProducts<4>, BFloat16>::kernels;
  return NeonBFloat16<BFloat16Products, BFloat16>::kernels;
}

}  // namespace moeserve
