// The limits of the machine itself: multiply-adds on registers, which touch no memory, and reads of memory.

#pragma once

#include <cstdint>
#include <cstring>

#include "isa.h"
#include "product_tile.h"

// The operand of inline assembly that is a vector register.
#if defined(__aarch64__)
#define MOESERVE_REGISTER(VECTOR) "+w"(VECTOR)
#else
#define MOESERVE_REGISTER(VECTOR) "+v"(VECTOR)
#endif

namespace moeserve {

// Executes multiply-adds on one thread, and returns their number.
using MultiplyOnes = int64_t (*)();

// Choose the instruction that multiplies most numbers of a format: kFloat32, kBFloat16, or kInt8 for bytes.
MultiplyOnes choose_multiply_ones(Isa isa, WeightFormat format);

constexpr int64_t kProbeSteps = 1 << 14;  // sums of 16 bits, to which a step adds 2, must not overflow
constexpr uint32_t kFloatOne = 0x3F800000, kBFloat16Ones = 0x3F803F80, kByteOnes = 0x01010101;

// Multiply ones with `Products::add` (product_tile.h), with as many sums as keep all units busy. A sum of ones is the
// number of multiply-adds, so the result counts those that were executed.
template <typename Products, typename Factors>
MOESERVE_INLINE int64_t multiply_ones(uint32_t word_of_ones) {
  constexpr int W = Products::W;
  constexpr int kSums = W == 8 ? 12 : 16;
  float word;
  std::memcpy(&word, &word_of_ones, sizeof(word));
  const volatile float zeros = 0, ones = word;  // of unknown value, so the compiler computes nothing beforehand
  typename Products::Sums sums[kSums];
  MOESERVE_UNROLL
  for (int i = 0; i < kSums; ++i) sums[i] = reinterpret_cast<typename Products::Sums>(broadcast<W>(zeros));
  auto weights = reinterpret_cast<Factors>(broadcast<W>(ones));
  const auto values = reinterpret_cast<Factors>(broadcast<W>(ones));
  for (int64_t step = 0; step < kProbeSteps; ++step) {
    MOESERVE_UNROLL
    for (int i = 0; i < kSums; ++i) {
      asm volatile("" : MOESERVE_REGISTER(weights));  // perhaps other weights, so no product is computed only once
      Products::add(sums[i], weights, values);
    }
  }
  int64_t count = 0;
  for (const auto& lanes : sums) {
    for (size_t i = 0; i < sizeof(lanes) / sizeof(lanes[0]); ++i) count += static_cast<int64_t>(lanes[i]);
  }
  return count;
}

}  // namespace moeserve
