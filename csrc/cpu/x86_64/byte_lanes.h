// Operations on vectors of bytes in segments of 16. They are inline assembly for the reason that lane_loads.h gives.

#pragma once

#include "cpu/vectors.h"

namespace moeserve {

// Return a table in each segment.
template <int W>
MOESERVE_INLINE typename Vector<W>::UInt broadcast_table(const ByteTable& table) {
  typename Vector<W>::UInt tables;
  if constexpr (W == 16) {
    asm("vbroadcasti32x4 %1, %0" : "=v"(tables) : "m"(table));
  } else {
    asm("vbroadcasti128 %1, %0" : "=x"(tables) : "m"(table));
  }
  return tables;
}

// Return the bytes of the tables at the indices in the low 4 bits of each byte, and zero for bytes from 128 on.
template <int W>
MOESERVE_INLINE typename Vector<W>::UInt look_up_or_zero(const typename Vector<W>::UInt& tables,
                                                         const typename Vector<W>::UInt& indices) {
  typename Vector<W>::UInt values;
  asm("vpshufb %2, %1, %0" : "=v"(values) : "v"(tables), "v"(indices));
  return values;
}

// Return the bytes of `a` and `b` in turn: those of the first half of each segment, or of the second.
template <int W>
MOESERVE_INLINE typename Vector<W>::UInt interleave_low(const typename Vector<W>::UInt& a,
                                                        const typename Vector<W>::UInt& b) {
  typename Vector<W>::UInt bytes;
  asm("vpunpcklbw %2, %1, %0" : "=v"(bytes) : "v"(a), "v"(b));
  return bytes;
}
template <int W>
MOESERVE_INLINE typename Vector<W>::UInt interleave_high(const typename Vector<W>::UInt& a,
                                                         const typename Vector<W>::UInt& b) {
  typename Vector<W>::UInt bytes;
  asm("vpunpckhbw %2, %1, %0" : "=v"(bytes) : "v"(a), "v"(b));
  return bytes;
}

}  // namespace moeserve
