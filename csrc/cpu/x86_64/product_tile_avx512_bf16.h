// The inner loops of products with VDPBF16PS: up to 6 rows times the 64 outputs of two panels, all sums in registers.

#pragma once

#include <immintrin.h>

#include <algorithm>

#include "cpu/isa.h"
#include "cpu/product_tile.h"

namespace moeserve {

constexpr int kDotRows = 6;

// A range of inputs of two panels.
struct DotBlock {
  const char* panels[2];
  int64_t num_inputs;
  bool is_first;  // overwrite the sums instead of adding to them
};

// Memory to prefetch to the L2 cache: kLines cache lines for every pair of inputs that a tile reads. With kAhead, a
// tile prefetches its own panels ahead of use and, with the last pairs, two lines each of the next panels. Cores that
// also compute read a stream of memory a quarter to a half faster this way.
struct DotPrefetch {
  const char* panels[2];
};

constexpr int kAhead = -1;
constexpr int64_t kLastPairs = 16;
constexpr int64_t kAheadBytes = 4096;

#define MOESERVE_DOT MOESERVE_TARGET_AVX512_BF16 MOESERVE_INLINE

// Load two inputs of the 32 outputs of a panel as two vectors.
MOESERVE_DOT void load_weights(const char* panel, int64_t pair, __m512bh (&lanes)[2]) {
  lanes[0] = (__m512bh)_mm512_loadu_si512(panel + pair * 128);
  lanes[1] = (__m512bh)_mm512_loadu_si512(panel + pair * 128 + 64);
}

MOESERVE_DOT __m512bh broadcast_pair(const BFloat16* input) {
  int32_t pair;
  std::memcpy(&pair, input, sizeof(pair));
  return (__m512bh)_mm512_set1_epi32(pair);
}

MOESERVE_DOT void prefetch_ahead(const char* panel, int64_t num_bytes) {
  for (int64_t byte = 0; byte < num_bytes; byte += 64) _mm_prefetch(panel + kAheadBytes + byte, _MM_HINT_T0);
}

constexpr int64_t kPairBytes = 4 * kPanel;  // bytes of an input pair in a panel

template <int kRows, int kLines>
MOESERVE_DOT void dot_pairs(const BFloat16* input, int64_t stride, const char* const (&panels)[2], int64_t num_pairs,
                            const DotPrefetch& next, __m512 (&sums)[kRows][4]) {
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    if constexpr (kLines >= 1) _mm_prefetch(next.panels[0] + pair * 64, _MM_HINT_T1);
    if constexpr (kLines >= 2) _mm_prefetch(next.panels[1] + pair * 64, _MM_HINT_T1);
    if constexpr (kLines == kAhead) {
      for (const char* panel : panels) prefetch_ahead(panel + pair * kPairBytes, kPairBytes);
    }
    __m512bh first[2], second[2];
    load_weights(panels[0], pair, first);
    load_weights(panels[1], pair, second);
    MOESERVE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const __m512bh values = broadcast_pair(input + r * stride + 2 * pair);
      sums[r][0] = _mm512_dpbf16_ps(sums[r][0], values, first[0]);
      sums[r][1] = _mm512_dpbf16_ps(sums[r][1], values, first[1]);
      sums[r][2] = _mm512_dpbf16_ps(sums[r][2], values, second[0]);
      sums[r][3] = _mm512_dpbf16_ps(sums[r][3], values, second[1]);
    }
  }
}

template <int kRows, int kLines>
MOESERVE_DOT void dot_tile(const BFloat16* input, int64_t stride, const DotBlock& block, const DotPrefetch& next,
                           float* targets) {
  __m512 sums[kRows][4];
  MOESERVE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    MOESERVE_UNROLL
    for (int v = 0; v < 4; ++v) {
      sums[r][v] = block.is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(targets + r * kTileOutputs + v * 16);
    }
  }
  const int64_t num_pairs = block.num_inputs / 2;
  if constexpr (kLines == kAhead) {
    const int64_t first = std::max<int64_t>(0, num_pairs - kLastPairs);
    const int64_t first_byte = first * kPairBytes;
    const char* const rest[2] = {block.panels[0] + first_byte, block.panels[1] + first_byte};
    dot_pairs<kRows, kAhead>(input, stride, block.panels, first, next, sums);
    dot_pairs<kRows, 2>(input + 2 * first, stride, rest, num_pairs - first, next, sums);
  } else {
    dot_pairs<kRows, kLines>(input, stride, block.panels, num_pairs, next, sums);
  }
  MOESERVE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    MOESERVE_UNROLL
    for (int v = 0; v < 4; ++v) {
      _mm512_storeu_ps(targets + r * kTileOutputs + v * 16, sums[r][v]);
    }
  }
}

#undef MOESERVE_DOT

}  // namespace moeserve
