// Operations on vectors of 16 bytes.

#pragma once

#include <cstring>

#include "cpu/vectors.h"

namespace moeserve {

template <int W>
MOESERVE_INLINE typename Vector<W>::UInt broadcast_table(const ByteTable& table) {
  typename Vector<W>::UInt bytes;
  std::memcpy(&bytes, &table, sizeof(bytes));
  return bytes;
}

// Return the bytes of the table at the indices in the low 4 bits of each byte, and zero for bytes from 128 on.
template <int W>
MOESERVE_INLINE typename Vector<W>::UInt look_up_or_zero(const typename Vector<W>::UInt& table,
                                                         const typename Vector<W>::UInt& indices) {
  typename Vector<W>::UInt values;
  asm("tbl %0.16b, {%1.16b}, %2.16b" : "=w"(values) : "w"(table), "w"(indices & 0x8F8F8F8Fu));
  return values;
}

// Return the bytes of `a` and `b` in turn: those of the first half, or of the second.
template <int W>
MOESERVE_INLINE typename Vector<W>::UInt interleave_low(const typename Vector<W>::UInt& a,
                                                        const typename Vector<W>::UInt& b) {
  typename Vector<W>::UInt bytes;
  asm("zip1 %0.16b, %1.16b, %2.16b" : "=w"(bytes) : "w"(a), "w"(b));
  return bytes;
}
template <int W>
MOESERVE_INLINE typename Vector<W>::UInt interleave_high(const typename Vector<W>::UInt& a,
                                                         const typename Vector<W>::UInt& b) {
  typename Vector<W>::UInt bytes;
  asm("zip2 %0.16b, %1.16b, %2.16b" : "=w"(bytes) : "w"(a), "w"(b));
  return bytes;
}

}  // namespace moeserve
