// Loads of vectors. They are inline assembly, because compilers otherwise assume the target of a function before it is
// inlined, and fill the lanes one by one.

#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/vectors.h"

namespace moeserve {

// Return `value` in all lanes.
template <int W>
MOESERVE_INLINE Float<W> broadcast(float value) {
  Float<W> lanes;
  asm("vbroadcastss %1, %0" : "=v"(lanes) : "vm"(value));
  return lanes;
}

// Load W unsigned bytes as floats.
template <int W>
MOESERVE_INLINE Float<W> load_bytes(const char* source) {
  typedef uint8_t Bytes __attribute__((vector_size(W), aligned(1), may_alias));
  typename Vector<W>::Int lanes;
  asm("vpmovzxbd %1, %0" : "=v"(lanes) : "m"(*reinterpret_cast<const Bytes*>(source)));
  return __builtin_convertvector(lanes, Float<W>);
}

// Load W unsigned integers of 16 bits.
template <int W>
MOESERVE_INLINE typename Vector<W>::UInt load_halves(const void* source) {
  typedef uint16_t Halves __attribute__((vector_size(2 * W), aligned(1), may_alias));
  typename Vector<W>::UInt lanes;
  asm("vpmovzxwd %1, %0" : "=v"(lanes) : "m"(*static_cast<const Halves*>(source)));
  return lanes;
}

// Load W float16 as floats.
template <int W>
MOESERVE_INLINE Float<W> load_float16(const char* source) {
  typedef uint16_t Halves __attribute__((vector_size(2 * W), aligned(1), may_alias));
  Float<W> lanes;
  asm("vcvtph2ps %1, %0" : "=v"(lanes) : "m"(*reinterpret_cast<const Halves*>(source)));
  return lanes;
}

// Return the bytes of a table at the indices in the bytes of `indices`, which are below 16.
template <int W>
MOESERVE_INLINE typename Vector<W>::UInt look_up(const ByteTable& table, const typename Vector<W>::UInt& indices) {
  typename Vector<W>::UInt tables, values;
  if constexpr (W == 16) {
    asm("vbroadcasti32x4 %1, %0" : "=v"(tables) : "m"(table));
  } else {
    asm("vbroadcasti128 %1, %0" : "=x"(tables) : "m"(table));
  }
  asm("vpshufb %2, %1, %0" : "=v"(values) : "v"(tables), "v"(indices));
  return values;
}

// Load 2 * W unsigned bytes as 16-bit integers.
template <int W>
MOESERVE_INLINE typename Vector<W>::Halves load_bytes_as_halves(const void* source) {
  typedef uint8_t Bytes __attribute__((vector_size(2 * W), aligned(1), may_alias));
  typename Vector<W>::Halves lanes;
  asm("vpmovzxbw %1, %0" : "=v"(lanes) : "m"(*static_cast<const Bytes*>(source)));
  return lanes;
}

typedef float Segment __attribute__((vector_size(16), aligned(1), may_alias));

MOESERVE_INLINE const Segment& segment_at(const char* address) { return *reinterpret_cast<const Segment*>(address); }

// Load W lanes in segments of 4: segment i begins at rows[4 * i] + offset.
template <int W>
MOESERVE_INLINE Float<W> load_segments(const char* const* rows, int64_t offset) {
  Float<W> lanes;
  if constexpr (W == 16) {
    asm("vmovups %1, %x0\n\t"
        "vinsertf32x4 $1, %2, %0, %0\n\t"
        "vinsertf32x4 $2, %3, %0, %0\n\t"
        "vinsertf32x4 $3, %4, %0, %0"
        : "=&v"(lanes)
        : "m"(segment_at(rows[0] + offset)), "m"(segment_at(rows[4] + offset)), "m"(segment_at(rows[8] + offset)),
          "m"(segment_at(rows[12] + offset)));
  } else {
    asm("vmovups %1, %x0\n\t"
        "vinsertf128 $1, %2, %0, %0"
        : "=&x"(lanes)
        : "m"(segment_at(rows[0] + offset)), "m"(segment_at(rows[4] + offset)));
  }
  return lanes;
}

}  // namespace moeserve
