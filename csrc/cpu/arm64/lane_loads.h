// Loads of vectors of 4 floats.

#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/vectors.h"

namespace moeserve {

// Return `value` in all lanes.
template <int W>
MOESERVE_INLINE Float<W> broadcast(float value) {
  static_assert(W == 4);
  return Float<W>{value, value, value, value};
}

// Load W unsigned bytes as floats.
template <int W>
MOESERVE_INLINE Float<W> load_bytes(const char* source) {
  float bytes;
  std::memcpy(&bytes, source, sizeof(bytes));
  typename Vector<W>::UInt lanes;
  asm("uxtl %0.8h, %1.8b\n\t"
      "uxtl %0.4s, %0.4h"
      : "=w"(lanes)
      : "w"(bytes));
  return __builtin_convertvector(lanes, Float<W>);
}

// Load W float16 as floats.
template <int W>
MOESERVE_INLINE Float<W> load_float16(const char* source) {
  double halves;
  std::memcpy(&halves, source, sizeof(halves));
  Float<W> lanes;
  asm("fcvtl %0.4s, %1.4h" : "=w"(lanes) : "w"(halves));
  return lanes;
}

// Return the bytes of a table at the indices in the bytes of `indices`, which are below 16.
template <int W>
MOESERVE_INLINE typename Vector<W>::UInt look_up(const ByteTable& table, const typename Vector<W>::UInt& indices) {
  typename Vector<W>::UInt lanes, values;
  std::memcpy(&lanes, &table, sizeof(lanes));
  asm("tbl %0.16b, {%1.16b}, %2.16b" : "=w"(values) : "w"(lanes), "w"(indices));
  return values;
}

// Load W unsigned integers of 16 bits.
template <int W>
MOESERVE_INLINE typename Vector<W>::UInt load_halves(const void* source) {
  double halves;
  std::memcpy(&halves, source, sizeof(halves));
  typename Vector<W>::UInt lanes;
  asm("uxtl %0.4s, %1.4h" : "=w"(lanes) : "w"(halves));
  return lanes;
}

// Load 2 * W unsigned bytes as 16-bit integers.
template <int W>
MOESERVE_INLINE typename Vector<W>::Halves load_bytes_as_halves(const void* source) {
  double bytes;
  std::memcpy(&bytes, source, sizeof(bytes));
  typename Vector<W>::Halves lanes;
  asm("uxtl %0.8h, %1.8b" : "=w"(lanes) : "w"(bytes));
  return lanes;
}

// Load W lanes from rows[0] + offset.
template <int W>
MOESERVE_INLINE Float<W> load_segments(const char* const* rows, int64_t offset) {
  Float<W> lanes;
  std::memcpy(&lanes, rows[0] + offset, sizeof(lanes));
  return lanes;
}

}  // namespace moeserve
