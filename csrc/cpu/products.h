// Sums of products of packed operands, W at a time. Defines the element types and the order of additions.
//
// Operands consist of 32-bit words. A step multiplies a word of one operand with W words of the other, and adds the
// results to W sums. The steps of a sum are sequential, so its bits depend only on its operands, not on its lane or on
// neighbouring sums.

#pragma once

#include <cstdint>
#include <cstring>

#include "isa.h"
#include "lanes.h"

namespace moeserve {

// A word is one float32. Each product is added with a fused multiply-add.
template <int kWidth>
struct FloatProducts {
  static constexpr int W = kWidth;
  static constexpr int kPerWord = 1;
  static constexpr int kVectors = W == 8 ? 2 : 4;  // vectors of sums that fit in the registers, of which AVX2 has half
  static constexpr int kExponentialDegree = 6;
  static constexpr int kStepGroup = 1;
  using Word = float;
  using Words = Float<W>;

  static MOESERVE_INLINE Words load_words(const Word* source) { return load<W>(source); }
  static MOESERVE_INLINE Words broadcast_word(const Word* source) { return broadcast<W>(*source); }
  static MOESERVE_INLINE Words ones() { return broadcast<W>(1.0f); }
  static MOESERVE_INLINE Words pack(const Float<W>* vectors) { return vectors[0]; }
  static MOESERVE_INLINE void add(Float<W>& sums, const Words& a, const Words& b) { sums += a * b; }
};

// Compute sums[r][v] = sum over `num_steps` of the words of row r times vector v of the strip [num_steps, kVectors *
// W].
template <typename Products, int kRows, int kVectors>
MOESERVE_INLINE void multiply(const typename Products::Word* rows, int64_t row_stride,
                              const typename Products::Word* strip, int num_steps,
                              Float<Products::W> (&sums)[kRows][kVectors]) {
  using Words = typename Products::Words;
  constexpr int W = Products::W;
  MOESERVE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    MOESERVE_UNROLL
    for (int v = 0; v < kVectors; ++v) sums[r][v] = Float<W>{};
  }
  for (int step = 0; step < num_steps; ++step) {
    Words lanes[kVectors];
    MOESERVE_UNROLL
    for (int v = 0; v < kVectors; ++v) lanes[v] = Products::load_words(strip + v * W);
    strip += Products::kVectors * W;
    MOESERVE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Words word = Products::broadcast_word(rows + r * row_stride + step);
      MOESERVE_UNROLL
      for (int v = 0; v < kVectors; ++v) Products::add(sums[r][v], lanes[v], word);
    }
  }
}

}  // namespace moeserve
