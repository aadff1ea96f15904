// Rounding of weights and of their scales while they are quantised.

#pragma once

#include <cstdint>
#include <cstring>

#include "lanes.h"
#include "weight_format.h"

namespace moeserve {

template <int W>
MOESERVE_INLINE Float<W> magnitude(Float<W> x) {
  return x > 0.0f ? x : -x;
}

template <int W>
MOESERVE_INLINE Float<W> round_to_integer(Float<W> x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  return (x + kRound) - kRound;
}

template <int W>
MOESERVE_INLINE Float<W> inverse_or_zero(Float<W> x) {
  return x != 0.0f ? 1.0f / x : Float<W>{};
}

// Round to nearest float16, ties to even, as floats. Inputs are not negative.
template <int W>
MOESERVE_INLINE Float<W> round_to_float16(Float<W> x) {
  constexpr float kLargest = 65504.0f;
  const Float<W> bounded = x < kLargest ? x : broadcast<W>(kLargest);
  const auto bits = reinterpret_cast<typename Vector<W>::UInt>(bounded * (1 / kFloat16Exponent));
  return reinterpret_cast<Float<W>>((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFFu) * kFloat16Exponent;
}

// Return the bits of a number that float16 represents exactly.
inline uint16_t float16_bits(float value) {
  value *= 1 / kFloat16Exponent;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>(bits >> 13);
}

inline float float16_value(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 13;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value * kFloat16Exponent;
}

}  // namespace moeserve
