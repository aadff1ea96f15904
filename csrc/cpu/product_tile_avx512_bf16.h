// The inner loops of products with VDPBF16PS: up to 6 rows times the 64 outputs of two panels, all sums in registers.
//
// Quantised weights are converted to bfloat16 in registers, exactly.

#pragma once

#include <immintrin.h>

#include <algorithm>

#include "isa.h"
#include "product_tile.h"

namespace moeserve {

constexpr int kDotRows = 6;

// Memory to prefetch to the L2 cache: kLines cache lines for every pair of inputs that a tile reads. With kAhead, a
// tile prefetches its own panels ahead of use and, with the last pairs, two lines each of the next panels. Cores read a
// stream of memory a quarter to a half faster this way if they also compute.
struct Prefetch {
  const char* panels[2];
};

constexpr int kAhead = -1;
constexpr int64_t kLastPairs = 16;
constexpr int64_t kAheadBytes = 4096;

#define MOESERVE_DOT MOESERVE_TARGET_AVX512_BF16 MOESERVE_INLINE

// Two inputs of the 32 outputs of a panel, as two vectors.
MOESERVE_DOT void load_weights(const char* panel, int64_t pair, __m512bh (&lanes)[2]) {
  lanes[0] = (__m512bh)_mm512_loadu_si512(panel + pair * 128);
  lanes[1] = (__m512bh)_mm512_loadu_si512(panel + pair * 128 + 64);
}

MOESERVE_DOT __m512 widen_int8(const char* values) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values))));
}

MOESERVE_DOT void load_int8(const char* panel, int64_t pair, __m512bh (&lanes)[2]) {
  const char* values = panel + pair * 64;
  lanes[0] = _mm512_cvtne2ps_pbh(widen_int8(values + 16), widen_int8(values));
  lanes[1] = _mm512_cvtne2ps_pbh(widen_int8(values + 48), widen_int8(values + 32));
}

MOESERVE_DOT __m512bh broadcast_pair(const BFloat16* input) {
  int32_t pair;
  std::memcpy(&pair, input, sizeof(pair));
  return (__m512bh)_mm512_set1_epi32(pair);
}

MOESERVE_DOT void prefetch_ahead(const char* panel, int64_t num_bytes) {
  for (int64_t byte = 0; byte < num_bytes; byte += 64) _mm_prefetch(panel + kAheadBytes + byte, _MM_HINT_T0);
}

MOESERVE_DOT void prefetch_lines(const char* lines) {
  _mm_prefetch(lines, _MM_HINT_T1);
  _mm_prefetch(lines + 64, _MM_HINT_T1);
}

template <WeightFormat kFormat>
constexpr int64_t kPairBytes = kFormat == WeightFormat::kInt8 ? 64 : 128;  // bytes of an input pair in a panel

template <int kRows, WeightFormat kFormat, int kLines>
MOESERVE_DOT void dot_pairs(const BFloat16* input, int64_t stride, const char* const (&panels)[2], int64_t num_pairs,
                            const Prefetch& next, __m512 (&sums)[kRows][4]) {
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    if constexpr (kLines >= 1) _mm_prefetch(next.panels[0] + pair * 64, _MM_HINT_T1);
    if constexpr (kLines >= 2) _mm_prefetch(next.panels[1] + pair * 64, _MM_HINT_T1);
    if constexpr (kLines == kAhead) {
      for (const char* panel : panels) prefetch_ahead(panel + pair * kPairBytes<kFormat>, kPairBytes<kFormat>);
    }
    __m512bh first[2], second[2];
    if constexpr (kFormat == WeightFormat::kInt8) {
      load_int8(panels[0], pair, first);
      load_int8(panels[1], pair, second);
    } else {
      load_weights(panels[0], pair, first);
      load_weights(panels[1], pair, second);
    }
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

template <int kRows, WeightFormat kFormat, int kLines>
MOESERVE_DOT void dot_tile(const BFloat16* input, int64_t stride, const Block& block, const Prefetch& next,
                           float* targets) {
  __m512 sums[kRows][4];
  const bool starts_at_zero = block.is_first || block.scales != nullptr;
  MOESERVE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    MOESERVE_UNROLL
    for (int v = 0; v < 4; ++v) {
      sums[r][v] = starts_at_zero ? _mm512_setzero_ps() : _mm512_loadu_ps(targets + r * kTileOutputs + v * 16);
    }
  }
  const int64_t num_pairs = block.num_inputs / 2;
  if constexpr (kLines == kAhead) {
    const int64_t first = std::max<int64_t>(0, num_pairs - kLastPairs);
    const int64_t first_byte = first * kPairBytes<kFormat>;
    const char* const rest[2] = {block.panels[0] + first_byte, block.panels[1] + first_byte};
    dot_pairs<kRows, kFormat, kAhead>(input, stride, block.panels, first, next, sums);
    dot_pairs<kRows, kFormat, 2>(input + 2 * first, stride, rest, num_pairs - first, next, sums);
  } else {
    dot_pairs<kRows, kFormat, kLines>(input, stride, block.panels, num_pairs, next, sums);
  }
  MOESERVE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    MOESERVE_UNROLL
    for (int v = 0; v < 4; ++v) {
      float* target = targets + r * kTileOutputs + v * 16;
      if (block.scales != nullptr) {
        const __m512 before = block.is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(target);
        sums[r][v] = _mm512_fmadd_ps(sums[r][v], _mm512_loadu_ps(block.scales + v * 16), before);
      }
      _mm512_storeu_ps(target, sums[r][v]);
    }
  }
}

// Two inputs of the 32 outputs of a panel from words of four values; kStep selects two values of each word.
template <int kStep>
MOESERVE_DOT void widen_int4(__m512i words, __m512i table, __m512bh (&lanes)[2]) {
  lanes[0] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8 * kStep), table);
  lanes[1] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8 * kStep + 4), table);
}

// The values of the codes in bfloat16, twice: the table is indexed with five bits, of which the fifth belongs to
// another code.
struct Int4Table {
  alignas(64) uint16_t bits[32] = {};

  constexpr Int4Table() {
    for (int i = 0; i < 32; ++i) bits[i] = bfloat16_bits(kInt4Values[i % 16]);
  }

  // Convert integers of at most 8 bits.
  static constexpr uint16_t bfloat16_bits(int value) {
    int magnitude = value < 0 ? -value : value;
    int exponent = 127 + 7;
    for (; magnitude < 128; magnitude *= 2) --exponent;
    return static_cast<uint16_t>((value < 0 ? 0x8000 : 0) | exponent << 7 | (magnitude & 127));
  }
};

MOESERVE_DOT __m512i int4_table() {
  static constexpr Int4Table kTable;
  return _mm512_load_si512(kTable.bits);
}

MOESERVE_DOT __m512 widen_scales(const char* scales) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// Widen inputs [first, last) of a quantised panel to a bfloat16 panel, and the scales of their one int4 group.
MOESERVE_TARGET_AVX512_BF16 inline void widen_panel(WeightFormat format, const char* panel, int64_t first, int64_t last,
                                                    char* target, float* scales) {
  __m512bh lanes[2];
  const auto write = [&](int64_t pair) MOESERVE_TARGET_AVX512_BF16 {
    _mm512_storeu_si512(target + pair * 128, (__m512i)lanes[0]);
    _mm512_storeu_si512(target + pair * 128 + 64, (__m512i)lanes[1]);
  };
  if (format == WeightFormat::kInt8) {
    for (int64_t pair = 0; pair < (last - first) / 2; ++pair) {
      load_int8(panel + first * kPanel, pair, lanes);
      write(pair);
    }
    return;
  }
  const char* group = panel + first / kInt4Group * kInt4GroupBytes;
  const __m512i table = int4_table();
  for (int quad = 0; quad < kInt4Group / 4; ++quad) {
    const __m512i words = _mm512_loadu_si512(group + quad * 64);
    widen_int4<0>(words, table, lanes);
    write(2 * quad);
    widen_int4<1>(words, table, lanes);
    write(2 * quad + 1);
  }
  for (int half = 0; half < 2; ++half) {
    _mm512_storeu_ps(scales + half * 16, widen_scales(group + kInt4ScalesAt + half * 32));
  }
}

// Multiply all inputs of int4 panels, group by group. Memory is prefetched as for the other formats, see kAhead.
template <int kRows>
MOESERVE_DOT void dot_int4(const BFloat16* input, int64_t stride, const char* const (&panels)[2], int64_t num_inputs,
                           const Prefetch& next, float* targets) {
  const __m512i table = int4_table();
  __m512 totals[kRows][4] = {};
  const char* groups[2] = {panels[0], panels[1]};
  for (int64_t k = 0; k < num_inputs; k += kInt4Group) {
    __m512 sums[kRows][4] = {};
    const bool is_last = k + kInt4Group >= num_inputs;
    for (int quad = 0; quad < kInt4Group / 4; ++quad) {
      for (int panel = 0; panel < 2; ++panel) {
        if (is_last) {
          prefetch_lines(next.panels[panel] + quad * 128);
        } else {
          prefetch_ahead(groups[panel] + quad * 64, 64);
        }
      }
      const __m512i words[2] = {_mm512_loadu_si512(groups[0] + quad * 64), _mm512_loadu_si512(groups[1] + quad * 64)};
      __m512bh first[2][2], second[2][2];
      widen_int4<0>(words[0], table, first[0]);
      widen_int4<1>(words[0], table, first[1]);
      widen_int4<0>(words[1], table, second[0]);
      widen_int4<1>(words[1], table, second[1]);
      MOESERVE_UNROLL
      for (int step = 0; step < 2; ++step) {
        MOESERVE_UNROLL
        for (int r = 0; r < kRows; ++r) {
          const __m512bh values = broadcast_pair(input + r * stride + k + 4 * quad + 2 * step);
          sums[r][0] = _mm512_dpbf16_ps(sums[r][0], values, first[step][0]);
          sums[r][1] = _mm512_dpbf16_ps(sums[r][1], values, first[step][1]);
          sums[r][2] = _mm512_dpbf16_ps(sums[r][2], values, second[step][0]);
          sums[r][3] = _mm512_dpbf16_ps(sums[r][3], values, second[step][1]);
        }
      }
    }
    for (int panel = 0; panel < 2; ++panel) {
      for (int half = 0; half < 2; ++half) {
        const __m512 scales = widen_scales(groups[panel] + kInt4ScalesAt + half * 32);
        MOESERVE_UNROLL
        for (int r = 0; r < kRows; ++r) {
          totals[r][panel * 2 + half] = _mm512_fmadd_ps(sums[r][panel * 2 + half], scales, totals[r][panel * 2 + half]);
        }
      }
      groups[panel] += kInt4GroupBytes;
    }
  }
  MOESERVE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    MOESERVE_UNROLL
    for (int v = 0; v < 4; ++v) _mm512_storeu_ps(targets + r * kTileOutputs + v * 16, totals[r][v]);
  }
}

#undef MOESERVE_DOT

}  // namespace moeserve
