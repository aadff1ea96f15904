// Packing of queries, keys and values of a block of positions, for the products of attention_block.cpp.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "attention_block.h"
#include "attention_lanes.h"
#include "float8_rows.h"

namespace moeserve {

// The layout of the operands in memory.
template <typename Products_, typename Element_>
struct Layout {
  using Products = Products_;
  using Element = Element_;
  using Word = typename Products::Word;
  using Words = typename Products::Words;
  static constexpr int W = Products::W;
  static constexpr int kPerWord = Products::kPerWord;
  static constexpr int kStrip = Products::kVectors * W;                     // lanes
  static constexpr int kPerLoad = 4 / sizeof(Element);                      // elements
  static constexpr int kStepsPerLoad = kPerLoad / kPerWord;                 // 2 if bfloat16 is widened
  static constexpr int kWeights = kBlock / Products::kPerWord;              // words of one query
  static constexpr int kValueStrip = kBlock / Products::kPerWord * kStrip;  // words
  static_assert(kBlock % kStrip == 0);

  static int key_loads(int head_size) { return (head_size + kPerLoad - 1) / kPerLoad; }
  static int key_steps(int head_size) {
    const int num_steps = key_loads(head_size) * kStepsPerLoad;
    return (num_steps + Products::kStepGroup - 1) / Products::kStepGroup * Products::kStepGroup;
  }
};

template <typename Element>
MOESERVE_INLINE const Element* elements_of(const void* row) {
  return static_cast<const Element*>(row);
}

// Copy a query as words, and zeros up to `num_steps`.
MOESERVE_INLINE void copy_query(const float* query, int head_size, int, float* words) {
  std::memcpy(words, query, head_size * sizeof(float));
}

MOESERVE_INLINE void copy_query(const BFloat16* query, int head_size, int num_steps, float* words) {
  for (int h = 0; h < head_size; ++h) words[h] = widen(query[h]);
  for (int step = head_size; step < num_steps; ++step) words[step] = 0;
}

MOESERVE_INLINE void copy_query(const BFloat16* query, int head_size, int num_steps, uint32_t* words) {
  for (int step = head_size / 2; step < num_steps; ++step) words[step] = 0;
  std::memcpy(words, query, head_size * sizeof(BFloat16));
}

// Prefetch `num_bytes`, from `first_byte` on, of the rows at some positions.
MOESERVE_INLINE void prefetch(const PrefetchRows& ahead, int position, int num_positions, size_t first_byte,
                              size_t num_bytes) {
  const int end = std::min(position + num_positions, ahead.range.end);
  for (int p = std::max(position, ahead.range.begin); p < end; ++p) {
    const auto* row = static_cast<const char*>(ahead.rows[p]) + first_byte;
    for (size_t byte = 0; byte < num_bytes; byte += 64) __builtin_prefetch(row + byte, 0, 2);
  }
}

template <int W, typename Element>
MOESERVE_INLINE void decode_float8(const Float8Rows& rows, int size) {
  for (int p = rows.range.begin; p < rows.range.end; ++p) {
    prefetch(rows.ahead, p, 1, 0, size);
    const auto* codes = static_cast<const uint8_t*>(rows.codes[p]);
    auto* target = static_cast<Element*>(rows.target) + int64_t{p} * size;
    decode_float8_row<W>(codes, rows.scales[rows.indices[p]], size, target);
  }
}

// Split one load of keys into words of packed keys.
template <int W>
MOESERVE_INLINE void split(Float<W> loaded, Float<W> (&words)[1], const float*) {
  words[0] = loaded;
}

// The same for bfloat16: the element in the low half comes first.
template <int W>
MOESERVE_INLINE void split(Float<W> loaded, Float<W> (&words)[2], const BFloat16*) {
  const auto halves = reinterpret_cast<typename Vector<W>::UInt>(loaded);
  words[0] = reinterpret_cast<Float<W>>(halves << 16);
  words[1] = reinterpret_cast<Float<W>>(halves & 0xFFFF0000u);
}

template <int W>
MOESERVE_INLINE void split(Float<W> loaded, typename Vector<W>::UInt (&words)[1], const BFloat16*) {
  words[0] = reinterpret_cast<typename Vector<W>::UInt>(loaded);
}

// One tile of transposed keys: W positions times W loads.
template <typename L>
struct KeyTile {
  Float<L::W> columns[L::W];
  int load;   // the load in columns[0]
  int begin;  // columns [begin, end) are valid and in no other tile
  int end;

  // Loads the tile that contains `first_load`.
  MOESERVE_INLINE KeyTile(const void* const* rows, int first_load, int head_size) {
    using Element = typename L::Element;
    constexpr int W = L::W;
    constexpr int kStepGroup = L::Products::kStepGroup;
    static_assert(kStepGroup == 1 || kStepGroup == W * L::kStepsPerLoad);
    const int num_loads = L::key_loads(head_size);
    const auto* bytes = reinterpret_cast<const char* const*>(rows);
    const bool is_whole = (first_load + W) * L::kPerLoad <= head_size;
    const bool may_overlap = kStepGroup == 1 && num_loads >= W && head_size % L::kPerLoad == 0;
    if (is_whole || may_overlap) {
      load = std::min(first_load, num_loads - W);  // the last tile may overlap the previous one
      begin = first_load - load;
      end = W;
      load_transposed<W>(bytes, int64_t{load} * 4, columns);
      return;
    }
    load = first_load;
    begin = 0;
    end = kStepGroup == 1 ? std::min(W, num_loads - load) : W;
    const int num_elements = std::min(W * L::kPerLoad, head_size - load * L::kPerLoad);
    Element elements[W][W * L::kPerLoad] = {};
    const char* copies[W];
    for (int i = 0; i < W; ++i) {
      std::memcpy(elements[i], bytes[i] + load * 4, num_elements * sizeof(Element));
      copies[i] = reinterpret_cast<const char*>(elements[i]);
    }
    load_transposed<W>(copies, 0, columns);
  }
};

template <typename L>
MOESERVE_INLINE void pack_keys(const void* const* rows, const PrefetchRows& ahead, Range range, int head_size,
                               typename L::Word* packed) {
  using Element = typename L::Element;
  constexpr int W = L::W;
  const int num_loads = L::key_loads(head_size);
  for (int at = range.begin; at < range.end; at += W) {
    auto* target = packed + at / L::kStrip * int64_t{L::kStrip} * L::key_steps(head_size) + at % L::kStrip;
    prefetch(ahead, at, W, 0, head_size * sizeof(Element));
    for (int first = 0; first < num_loads; first += W) {
      const KeyTile<L> tile(rows + at, first, head_size);
      auto* step = target + int64_t{tile.load} * L::kStepsPerLoad * L::kStrip;
      MOESERVE_UNROLL
      for (int i = 0; i < W; ++i) {
        if (i >= tile.end) continue;
        typename L::Words words[L::kStepsPerLoad];
        split<W>(tile.columns[i], words, elements_of<Element>(nullptr));
        MOESERVE_UNROLL
        for (int s = 0; s < L::kStepsPerLoad; ++s) {
          std::memcpy(step + (i * L::kStepsPerLoad + s) * L::kStrip, &words[s], sizeof(words[s]));
        }
      }
    }
  }
}

// Load a step of values from element h on as one vector per element of a word. Lanes beyond value_size are zero.
template <int W, typename Element>
MOESERVE_INLINE void load_values(const void* const* rows, int h, Float<W> (&words)[1], const Element*) {
  words[0] = load_in_order<W>(elements_of<Element>(rows[0]) + h);
}

// For bfloat16, a word holds an element of the first row and the same element of the second row.
template <int W>
MOESERVE_INLINE void load_values(const void* const* rows, int h, typename Vector<W>::UInt (&words)[2],
                                 const BFloat16*) {
  typename Vector<W>::Halves pair[2];
  MOESERVE_UNROLL
  for (int i = 0; i < 2; ++i) std::memcpy(&pair[i], elements_of<BFloat16>(rows[i]) + h, sizeof(pair[i]));
  constexpr auto kHalves = std::make_integer_sequence<int, 2 * W>{};
  words[0] = reinterpret_cast<typename Vector<W>::UInt>(interleave_halves<W, 0>(pair[0], pair[1], kHalves));
  words[1] = reinterpret_cast<typename Vector<W>::UInt>(interleave_halves<W, W>(pair[0], pair[1], kHalves));
}

// Like `load_values`, for the last elements, which do not fill the vectors. Other lanes are zero.
template <typename L>
MOESERVE_INLINE void load_last_values(const void* const* rows, int h, int value_size,
                                      typename L::Words (&words)[L::kPerWord]) {
  using Element = typename L::Element;
  Element elements[L::kPerWord][L::kPerWord * L::W] = {};
  const void* copies[L::kPerWord];
  for (int i = 0; i < L::kPerWord; ++i) {
    std::memcpy(elements[i], elements_of<Element>(rows[i]) + h, (value_size - h) * sizeof(Element));
    copies[i] = elements[i];
  }
  load_values<L::W>(copies, 0, words, elements_of<Element>(nullptr));
}

template <typename L>
MOESERVE_INLINE void pack_values(const void* const* rows, const PrefetchRows& ahead, Range range, int value_size,
                                 typename L::Word* packed) {
  using Element = typename L::Element;
  constexpr int W = L::W;
  for (int p = range.begin; p < range.end; p += L::kPerWord) {
    prefetch(ahead, p, L::kPerWord, 0, value_size * sizeof(Element));
    auto* step = packed + p / L::kPerWord * L::kStrip;
    for (int h = 0; h < value_size; h += L::kPerWord * W) {
      typename L::Words words[L::kPerWord];
      if (h + L::kPerWord * W <= value_size) {
        load_values<W>(rows + p, h, words, elements_of<Element>(nullptr));
      } else {
        load_last_values<L>(rows + p, h, value_size, words);
      }
      auto* target = step + h / L::kStrip * int64_t{L::kValueStrip} + h % L::kStrip;
      MOESERVE_UNROLL
      for (int i = 0; i < L::kPerWord; ++i) std::memcpy(target + i * W, &words[i], sizeof(words[i]));
    }
  }
}

}  // namespace moeserve
