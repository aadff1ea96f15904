// Operations on vectors of W floats, for kernels that are written once and compiled for several instruction sets.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "isa.h"
#include "lane_loads.h"
#include "vectors.h"

namespace moeserve {

template <int W>
MOESERVE_INLINE Float<W> load(const float* source) {
  Float<W> lanes;
  std::memcpy(&lanes, source, sizeof(lanes));
  return lanes;
}

template <int W>
MOESERVE_INLINE void store(float* target, Float<W> lanes) {
  std::memcpy(target, &lanes, sizeof(lanes));
}

// Return the larger lanes. If a lane of either is NaN, the result is the lane of `b`.
template <int W>
MOESERVE_INLINE Float<W> larger(Float<W> a, Float<W> b) {
  return a > b ? a : b;
}

// Return e^x for x <= 0, within 2 units in the last place. Below -87 the result is e^-87. NaN stays NaN.
template <int W>
MOESERVE_INLINE Float<W> exp_of_nonpositive(Float<W> x) {
  using Int = typename Vector<W>::Int;
  constexpr float kLowest = -87.0f;  // e^-87 is still a normal number
  constexpr float kLog2E = 1.44269504f;
  constexpr float kLn2High = 0.693145751953125f;  // has few bits, so its product with a small integer is exact
  constexpr float kLn2Low = 1.42860677e-6f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves an integer in the low bits
  constexpr int32_t kRoundBits = 0x4B400000;

  // x = n ln 2 + r with |r| <= ln 2 / 2, e^x = 2^n e^r.
  x = larger<W>(broadcast<W>(kLowest), x);
  const Float<W> shifted = x * kLog2E + kRound;
  const Float<W> n = shifted - kRound;
  const Float<W> r = (x - n * kLn2High) - n * kLn2Low;
  // The Taylor series. The first omitted term is below 6e-9.
  Float<W> power = r * (1.0f / 5040) + (1.0f / 720);
  power = power * r + (1.0f / 120);
  power = power * r + (1.0f / 24);
  power = power * r + (1.0f / 6);
  power = power * r + 0.5f;
  power = power * r + 1.0f;
  power = power * r + 1.0f;
  const Int exponent = (reinterpret_cast<Int>(shifted) - kRoundBits + 127) << 23;
  return power * reinterpret_cast<Float<W>>(exponent);
}

template <int W>
MOESERVE_INLINE Float<W> sigmoid(Float<W> x) {
  const Float<W> power = exp_of_nonpositive<W>(x > 0.0f ? -x : x);
  const Float<W> numerator = x > 0.0f ? broadcast<W>(1.0f) : power;
  return numerator / (1.0f + power);
}

// Return tanh(x), within 3e-7 of its size. NaN stays NaN.
template <int W>
MOESERVE_INLINE Float<W> tanh_of(Float<W> x) {
  constexpr float kLargest = 7.9053111f;  // the result is 1 from here on
  x = x > kLargest ? broadcast<W>(kLargest) : x;
  x = x < -kLargest ? broadcast<W>(-kLargest) : x;
  // A quotient of polynomials: Eigen's coefficients.
  const Float<W> square = x * x;
  Float<W> above = square * -2.76076847742355e-16f + 2.00018790482477e-13f;
  above = above * square + -8.60467152213735e-11f;
  above = above * square + 5.12229709037114e-08f;
  above = above * square + 1.48572235717979e-05f;
  above = above * square + 6.37261928875436e-04f;
  above = above * square + 4.89352455891786e-03f;
  Float<W> below = square * 1.19825839466702e-06f + 1.18534705686654e-04f;
  below = below * square + 2.26843463243900e-03f;
  below = below * square + 4.89352518554385e-03f;
  return x * above / below;
}

// Select lanes by index from `a` followed by `b`.
template <int W, int... kIndex>
MOESERVE_INLINE Float<W> pick(Float<W> a, Float<W> b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kIndex...);
#else
  return __builtin_shuffle(a, b, typename Vector<W>::Int{kIndex...});
#endif
}

// `a` and `b` consist of segments of 2 * kHalf lanes. Return the sums of the two halves of each segment: first those of
// `a`, then those of `b`.
template <int W, int kHalf, int... kLane>
MOESERVE_INLINE Float<W> fold(Float<W> a, Float<W> b, std::integer_sequence<int, kLane...>) {
  return pick<W, (kLane / kHalf * 2 * kHalf + kLane % kHalf)...>(a, b) +
         pick<W, (kLane / kHalf * 2 * kHalf + kLane % kHalf + kHalf)...>(a, b);
}

// Return a vector whose lane i is the sum of all lanes of vectors[i].
template <int W, int kCount = W>
MOESERVE_INLINE Float<W> sum_each(Float<W> (&vectors)[W]) {
  if constexpr (kCount == 1) {
    return vectors[0];
  } else {
    MOESERVE_UNROLL
    for (int i = 0; i < kCount / 2; ++i) {
      vectors[i] = fold<W, kCount / 2>(vectors[2 * i], vectors[2 * i + 1], std::make_integer_sequence<int, W>{});
    }
    return sum_each<W, kCount / 2>(vectors);
  }
}

// 2 * W consecutive elements as two vectors. The assignment of elements to lanes depends on the element type: see
// `load_pair`.
template <int W>
struct Pair {
  Float<W> first;
  Float<W> second;
};

template <int W>
MOESERVE_INLINE Pair<W> load_pair(const float* source) {
  return {load<W>(source), load<W>(source + W)};
}

// For bfloat16: first the even elements, then the odd ones. They are the halves of 32-bit words, so widening is a
// shift.
template <int W>
MOESERVE_INLINE Pair<W> load_pair(const BFloat16* source) {
  typename Vector<W>::UInt words;
  std::memcpy(&words, source, sizeof(words));
  return {reinterpret_cast<Float<W>>(words << 16), reinterpret_cast<Float<W>>(words & 0xFFFF0000u)};
}

// Load W consecutive elements in order.
template <int W>
MOESERVE_INLINE Float<W> load_in_order(const float* source) {
  return load<W>(source);
}
template <int W>
MOESERVE_INLINE Float<W> load_in_order(const BFloat16* source) {
  return reinterpret_cast<Float<W>>(load_halves<W>(source) << 16);
}

// Load the first `count` elements; the other lanes are zero.
template <int W, typename Element>
MOESERVE_INLINE Pair<W> load_first(const Element* source, int count) {
  Element elements[2 * W] = {};
  for (int i = 0; i < count; ++i) elements[i] = source[i];
  return load_pair<W>(elements);
}

MOESERVE_INLINE float widen(float value) { return value; }

MOESERVE_INLINE float widen(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float widened;
  std::memcpy(&widened, &bits, sizeof(widened));
  return widened;
}

MOESERVE_INLINE void assign(float* target, float value) { *target = value; }

// Round to nearest, ties to even.
MOESERVE_INLINE void assign(BFloat16* target, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40;
  target->bits = static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? quiet_nan : rounded);
}

}  // namespace moeserve
