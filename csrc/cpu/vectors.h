// The types of vectors of W floats and of W integers, and the rules for compiling code that uses them.
//
// All code on vectors is inlined into its caller, and uses the caller's instruction set: W = 16 needs AVX-512, 8 needs
// AVX2, and 4 needs NEON. No vector is passed in a call, so the ABI warnings of GCC (-Wpsabi) do not apply.

#pragma once

#include <cstdint>

#define MOESERVE_INLINE inline __attribute__((always_inline))

// Unrolls a loop over an array of vectors, so that the array stays in registers.
#if defined(__clang__)
#define MOESERVE_UNROLL _Pragma("unroll")
#else
#define MOESERVE_UNROLL _Pragma("GCC unroll 16")
#endif

namespace moeserve {

struct BFloat16 {
  uint16_t bits;
};

template <int W>
struct Vector {
  typedef float Float __attribute__((vector_size(W * sizeof(float))));
  typedef int32_t Int __attribute__((vector_size(W * sizeof(int32_t))));
  typedef uint32_t UInt __attribute__((vector_size(W * sizeof(uint32_t))));
  typedef uint16_t Halves __attribute__((vector_size(W * sizeof(uint32_t))));
  typedef uint16_t HalfAsMany __attribute__((vector_size(W * sizeof(uint16_t))));
};

template <int W>
using Float = typename Vector<W>::Float;

// A table of 16 bytes.
struct ByteTable {
  uint8_t bytes[16];
};

}  // namespace moeserve
