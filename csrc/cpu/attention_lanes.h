// Vector operations of attention: powers of 2, transposition and interleaving.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "lanes.h"

namespace moeserve {

// Return 2^x for x <= 0: 0 below -126, exactly 1 at 0, NaN for NaN. The error is at most 2 units in the last place with
// kDegree 6, and 3e-6 relative with kDegree 4.
template <int W, int kDegree>
MOESERVE_INLINE Float<W> exp2_of_nonpositive(Float<W> x) {
  static_assert(kDegree == 4 || kDegree == 6);
  using Int = typename Vector<W>::Int;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves an integer in the low bits

  // x = n + r with |r| <= 1/2; 2^r by the minimax polynomial for the relative error.
  const Float<W> shifted = x + kRound;
  const Float<W> r = x - (shifted - kRound);
  Float<W> power;
  if constexpr (kDegree == 6) {
    power = r * 1.5353362e-4f + 1.33988739e-3f;
    power = power * r + 9.61843692e-3f;
    power = power * r + 5.5503324e-2f;
    power = power * r + 2.40226477e-1f;
    power = power * r + 6.93147182e-1f;
  } else {
    power = r * 9.58285294e-3f + 5.59064262e-2f;
    power = power * r + 2.40240991e-1f;
    power = power * r + 6.93124175e-1f;
  }
  power = power * r + 1.0f;
  const Int exponent = (reinterpret_cast<Int>(shifted) << 23) + 0x3F800000;
  const Float<W> result = power * reinterpret_cast<Float<W>>(exponent);
  return x < -126.0f ? Float<W>{} : result;
}

// Interleave a and b in each segment of 4 lanes, by kSize lanes, from kFirst on.
template <int W, int kFirst, int kSize, int... kLane>
MOESERVE_INLINE Float<W> interleave(Float<W> a, Float<W> b, std::integer_sequence<int, kLane...>) {
  return pick<W, (kLane / 4 * 4 + kFirst + kLane % 4 / (2 * kSize) * kSize + kLane % kSize + kLane / kSize % 2 * W)...>(
      a, b);
}

// Load 4 floats of each of W rows, transposed: lane i of columns[j] is the float at rows[i] + offset + 4 * j.
template <int W>
MOESERVE_INLINE void load_four_transposed(const char* const* rows, int64_t offset, Float<W>* columns) {
  constexpr auto kLanes = std::make_integer_sequence<int, W>{};
  // Each vector holds 4 floats of every fourth row. The 4 vectors are transposed within their segments.
  Float<W> four[4];
  MOESERVE_UNROLL
  for (int i = 0; i < 4; ++i) four[i] = load_segments<W>(rows + i, offset);
  const Float<W> low01 = interleave<W, 0, 1>(four[0], four[1], kLanes);
  const Float<W> high01 = interleave<W, 2, 1>(four[0], four[1], kLanes);
  const Float<W> low23 = interleave<W, 0, 1>(four[2], four[3], kLanes);
  const Float<W> high23 = interleave<W, 2, 1>(four[2], four[3], kLanes);
  columns[0] = interleave<W, 0, 2>(low01, low23, kLanes);
  columns[1] = interleave<W, 2, 2>(low01, low23, kLanes);
  columns[2] = interleave<W, 0, 2>(high01, high23, kLanes);
  columns[3] = interleave<W, 2, 2>(high01, high23, kLanes);
}

// The same for W floats of each row.
template <int W>
MOESERVE_INLINE void load_transposed(const char* const* rows, int64_t offset, Float<W> (&columns)[W]) {
  MOESERVE_UNROLL
  for (int column = 0; column < W; column += 4) {
    load_four_transposed<W>(rows, offset + 4 * column, columns + column);
  }
}

// Interleave 16-bit lanes of `a` and `b`, from kFirst on.
template <int W, int kFirst, int... kHalf>
MOESERVE_INLINE typename Vector<W>::Halves interleave_halves(typename Vector<W>::Halves a, typename Vector<W>::Halves b,
                                                             std::integer_sequence<int, kHalf...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (kFirst + kHalf / 2 + kHalf % 2 * 2 * W)...);
#else
  return __builtin_shuffle(a, b, typename Vector<W>::Halves{(kFirst + kHalf / 2 + kHalf % 2 * 2 * W)...});
#endif
}

// Return true for a number that is neither infinite nor NaN.
MOESERVE_INLINE bool is_finite(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return (bits & 0x7F800000) != 0x7F800000;
}
MOESERVE_INLINE bool is_finite(BFloat16 value) { return (value.bits & 0x7F80) != 0x7F80; }

}  // namespace moeserve
