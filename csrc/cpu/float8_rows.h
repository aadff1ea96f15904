// Rows of keys and values as 8-bit floats (E4M3), with a scale for each row.
// `moeserve/ops/attention/float8_rows.py` defines the format.
//
// Scales have 4 significant bits, as codes have, so the product of both is exact in bfloat16.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "rows.h"

namespace moeserve {

constexpr float kLargestCode = 448.0f;
constexpr float kLeastNumber = 0.015625f;          // 2^-6, the smallest code above zero
constexpr float kLeastRange = 7.888609052e-31f;    // 2^-100
constexpr float kLargestRange = 57344.0f;          // 448 * 2^7
constexpr float kExponentShift = 1.329227996e36f;  // 2^120: the difference of the exponent biases of float32 and E4M3

// Return the numbers of W codes, each in the highest byte of its lane. `factor` is the scale * kExponentShift.
template <int W>
MOESERVE_INLINE Float<W> decode_lanes(typename Vector<W>::UInt codes, Float<W> factor) {
  const auto bits = (reinterpret_cast<typename Vector<W>::Int>(codes) >> 4) & static_cast<int32_t>(0x87F00000u);
  return reinterpret_cast<Float<W>>(bits) * factor;
}

// Return 2 * W numbers as bfloat16.
template <int W>
MOESERVE_INLINE typename Vector<W>::UInt decode_float8(const uint8_t* codes, Float<W> factor) {
  using UInt = typename Vector<W>::UInt;
  const UInt pairs = reinterpret_cast<UInt>(load_bytes_as_halves<W>(codes));
  const UInt first = reinterpret_cast<UInt>(decode_lanes<W>(pairs << 24, factor));
  const UInt second = reinterpret_cast<UInt>(decode_lanes<W>(pairs << 8, factor));
  return (first >> 16) | second;
}

template <int W>
MOESERVE_INLINE void store_numbers(typename Vector<W>::UInt numbers, BFloat16* target) {
  std::memcpy(target, &numbers, sizeof(numbers));
}
template <int W>
MOESERVE_INLINE void store_numbers(typename Vector<W>::UInt numbers, float* target) {
  BFloat16 halves[2 * W];
  std::memcpy(halves, &numbers, sizeof(numbers));
  store<W>(target, load_in_order<W>(halves));
  store<W>(target + W, load_in_order<W>(halves + W));
}

template <int W, typename Element>
MOESERVE_INLINE void decode_float8_row(const uint8_t* codes, BFloat16 scale, int size, Element* target) {
  const Float<W> factor = broadcast<W>(widen(scale) * kExponentShift);
  int h = 0;
  for (; h + 2 * W <= size; h += 2 * W) store_numbers<W>(decode_float8<W>(codes + h, factor), target + h);
  if (h == size) return;
  uint8_t last_codes[2 * W] = {};
  Element last[2 * W];
  std::memcpy(last_codes, codes + h, size - h);
  store_numbers<W>(decode_float8<W>(last_codes, factor), last);
  std::memcpy(target + h, last, (size - h) * sizeof(Element));
}

// Round W numbers to codes, each in the low byte of its lane, to nearest with ties to even.
template <int W>
MOESERVE_INLINE typename Vector<W>::UInt encode_float8(Float<W> numbers, Float<W> scale) {
  using UInt = typename Vector<W>::UInt;
  const UInt bits = reinterpret_cast<UInt>(numbers);
  const Float<W> largest = broadcast<W>(kLargestCode), least = broadcast<W>(kLeastNumber);
  Float<W> scaled = reinterpret_cast<Float<W>>(bits & 0x7FFFFFFFu) / scale;
  scaled = scaled > largest ? largest : scaled;
  scaled = scaled < least ? Float<W>{} : scaled;
  const UInt magnitude = reinterpret_cast<UInt>(scaled * (1.0f / kExponentShift));
  const UInt code = (magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u)) >> 20;
  return code | ((bits >> 24) & 0x80u);
}

// Write the codes of a row, and return its scale.
template <int W, typename Element>
MOESERVE_INLINE BFloat16 encode_float8_row(const Element* row, int size, uint8_t* codes) {
  typedef uint8_t Bytes __attribute__((vector_size(W)));
  using UInt = typename Vector<W>::UInt;
  Element last[W] = {};
  const int num_whole = size / W * W;
  std::memcpy(last, row + num_whole, (size - num_whole) * sizeof(Element));
  const auto load_at = [&](int h) __attribute__((always_inline)) {
    return h < num_whole ? load_in_order<W>(row + h) : load_in_order<W>(last);
  };
  Float<W> largest{}, zeros{};
  for (int h = 0; h < size; h += W) {
    const Float<W> numbers = load_at(h);
    zeros += numbers * 0.0f;  // NaN for numbers that are not finite
    largest = larger<W>(reinterpret_cast<Float<W>>(reinterpret_cast<UInt>(numbers) & 0x7FFFFFFFu), largest);
  }
  if (!(sum_lanes<W>(zeros) == 0.0f)) {
    std::memset(codes, 0, size);
    return BFloat16{0x7FC0};  // NaN
  }
  const float range = std::min(std::max(largest_lane<W>(largest), kLeastRange), kLargestRange) / kLargestCode;
  uint32_t bits;
  std::memcpy(&bits, &range, sizeof(bits));
  const BFloat16 scale{static_cast<uint16_t>(((bits + 0xFFFFFu) & 0xFFF00000u) >> 16)};  // up, to 4 bits
  const Float<W> divisor = broadcast<W>(widen(scale));
  for (int h = 0; h < size; h += W) {
    const Bytes bytes = __builtin_convertvector(encode_float8<W>(load_at(h), divisor), Bytes);
    std::memcpy(codes + h, &bytes, std::min(W, size - h));
  }
  return scale;
}

}  // namespace moeserve
