// The kernels of attention over one block, as templates that are compiled for each instruction set.

#pragma once

#include <algorithm>
#include <cstring>

#include "attention_block.h"
#include "attention_packing.h"
#include "products.h"
#include "rows.h"

namespace moeserve {

template <typename Element>
MOESERVE_INLINE bool all_finite(const void* const* rows, Range range, int value_size) {
  int num_others = 0;
  for (int p = range.begin; p < range.end; ++p) {
    const auto* row = elements_of<Element>(rows[p]);
    for (int h = 0; h < value_size; ++h) num_others += is_finite(row[h]) ? 0 : 1;
  }
  return num_others == 0;
}

// Compute the products of kRows queries with kVectors vectors of packed keys from position `at` on.
template <typename L, int kRows, int kVectors>
MOESERVE_INLINE void multiply_packed(const Tile& tile, int head_size, int at, Float<L::W> (&sums)[kRows][kVectors]) {
  const int num_steps = L::key_steps(head_size);
  const auto* keys = static_cast<const typename L::Word*>(tile.packed);
  const auto* strip = keys + at / L::kStrip * int64_t{L::kStrip} * num_steps + at % L::kStrip;
  multiply<typename L::Products, kRows, kVectors>(static_cast<const typename L::Word*>(tile.queries), num_steps, strip,
                                                  num_steps, sums);
}

template <typename L, int kRows>
struct Scores {
  // Store the scores of kVectors vectors of positions.
  template <int kVectors>
  MOESERVE_INLINE void compute(const Tile& tile, int head_size, int at) const {
    constexpr int W = L::W;
    Float<W> sums[kRows][kVectors];
    multiply_packed<L, kRows, kVectors>(tile, head_size, at, sums);
    const Float<W> factor = broadcast<W>(tile.factor);
    MOESERVE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      MOESERVE_UNROLL
      for (int v = 0; v < kVectors; ++v) store<W>(tile.scores + r * kBlock + at + v * W, sums[r][v] * factor);
    }
  }
};

// Call `of_vectors.compute<kVectors>` for all vectors of the positions of a tile, as many at a time as a strip has.
template <typename L, typename OfVectors>
MOESERVE_INLINE void for_vectors(const Tile& tile, int head_size, const OfVectors& of_vectors) {
  constexpr int W = L::W;
  constexpr int kMost = L::Products::kVectors;
  for (int at = tile.range.begin; at < tile.range.end;) {
    const int num_vectors = std::min(kMost - at / W % kMost, (tile.range.end - at) / W);
    if (num_vectors == kMost) {
      of_vectors.template compute<kMost>(tile, head_size, at);
      at += kMost * W;
    } else if (num_vectors >= 2) {
      of_vectors.template compute<2>(tile, head_size, at);
      at += 2 * W;
    } else {
      of_vectors.template compute<1>(tile, head_size, at);
      at += W;
    }
  }
}

template <typename L, int kRows>
MOESERVE_INLINE void score_packed(const Tile& tile, int head_size) {
  for_vectors<L>(tile, head_size, Scores<L, kRows>());
}

// Add the products of kRows queries with columns [begin, end) of a tile.
template <typename L, int kRows>
MOESERVE_INLINE void add_columns(const Float<L::W> (&columns)[L::W], int begin, int end,
                                 const typename L::Word* queries, int num_steps, Float<L::W> (&sums)[kRows]) {
  using Products = typename L::Products;
  MOESERVE_UNROLL
  for (int i = 0; i < L::W; ++i) {
    if (i < begin || i >= end) continue;
    typename L::Words words[L::kStepsPerLoad];
    split<L::W>(columns[i], words, elements_of<typename L::Element>(nullptr));
    MOESERVE_UNROLL
    for (int s = 0; s < L::kStepsPerLoad; ++s) {
      MOESERVE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const auto* query = queries + r * num_steps + i * L::kStepsPerLoad + s;
        Products::add(sums[r], words[s], Products::broadcast_word(query));
      }
    }
  }
}

// Compute the same sums from keys that are read in place.
template <typename L, int kRows>
MOESERVE_INLINE void score_in_place(const Tile& tile, int head_size) {
  constexpr int W = L::W;
  const int num_loads = L::key_loads(head_size);
  const int num_whole = head_size / L::kPerLoad / W * W;
  const int num_steps = L::key_steps(head_size);
  const auto* queries = static_cast<const typename L::Word*>(tile.queries);
  const Float<W> factor = broadcast<W>(tile.factor);
  for (int at = tile.range.begin; at < tile.range.end; at += W) {
    prefetch(tile.keys_ahead, at, W, 0, head_size * sizeof(typename L::Element));
    Float<W> sums[kRows];
    MOESERVE_UNROLL
    for (int r = 0; r < kRows; ++r) sums[r] = Float<W>{};
    for (int first = 0; first < num_whole; first += W) {
      Float<W> columns[W];
      load_transposed<W>(reinterpret_cast<const char* const*>(tile.keys + at), int64_t{first} * 4, columns);
      add_columns<L, kRows>(columns, 0, W, queries + first * L::kStepsPerLoad, num_steps, sums);
    }
    if (num_whole < num_loads) {
      const KeyTile<L> last(tile.keys + at, num_whole, head_size);
      add_columns<L, kRows>(last.columns, last.begin, last.end, queries + last.load * L::kStepsPerLoad, num_steps,
                            sums);
    }
    MOESERVE_UNROLL
    for (int r = 0; r < kRows; ++r) store<W>(tile.scores + r * kBlock + at, sums[r] * factor);
  }
}

// Return a sum of positive scores times weights with one more product. NaN is not positive.
template <int W>
MOESERVE_INLINE Float<W> add_positive_score(Float<W> sum, Float<W> score, float weight) {
  return sum + larger<W>(score, Float<W>{}) * broadcast<W>(weight);
}

template <typename L, int kRows>
struct PositiveSums {
  const float* weights;
  float* sums;

  // Add the scores of kVectors vectors of positions that are positive, times the weights of their queries.
  template <int kVectors>
  MOESERVE_INLINE void compute(const Tile& tile, int head_size, int at) const {
    constexpr int W = L::W;
    Float<W> scores[kRows][kVectors];
    multiply_packed<L, kRows, kVectors>(tile, head_size, at, scores);
    MOESERVE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      Float<W> sum = load<W>(sums + at + v * W);
      MOESERVE_UNROLL
      for (int r = 0; r < kRows; ++r) sum = add_positive_score<W>(sum, scores[r][v], weights[r]);
      store<W>(sums + at + v * W, sum);
    }
  }
};

// Add the positive scores of a tile, times the weights of their queries, to the sums of the positions. NaN does not
// count as positive.
template <typename L>
MOESERVE_INLINE void add_weighted(const Tile& tile, const float* weights, float* sums) {
  constexpr int W = L::W;
  for (int at = tile.range.begin; at < tile.range.end; at += W) {
    Float<W> sum = load<W>(sums + at);
    for (int r = 0; r < tile.num_queries; ++r) {
      sum = add_positive_score<W>(sum, load<W>(tile.scores + r * kBlock + at), weights[r]);
    }
    store<W>(sums + at, sum);
  }
}

// Return all ones in the first `count` lanes, and zeros in the others. `count` may be negative or exceed the lanes.
template <int W>
MOESERVE_INLINE typename Vector<W>::UInt first_lanes(int count) {
  // The mask is loaded, because GCC splits comparisons of wide vectors into lanes.
  static constexpr int32_t kLanes[32] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
  typename Vector<W>::UInt lanes;
  std::memcpy(&lanes, kLanes + 16 - std::clamp(count, 0, W), sizeof(lanes));
  return lanes;
}

// Set the scores of positions in a range that a query does not attend to below all other scores.
template <int W>
MOESERVE_INLINE void mask(float* scores, Range range, Range visible) {
  using UInt = typename Vector<W>::UInt;
  const UInt lowest = reinterpret_cast<UInt>(broadcast<W>(-std::numeric_limits<float>::infinity()));
  for (int at = range.begin; at < range.end; at += W) {
    const UInt is_visible = first_lanes<W>(visible.end - at) & ~first_lanes<W>(visible.begin - at);
    const UInt bits = reinterpret_cast<UInt>(load<W>(scores + at));
    store<W>(scores + at, reinterpret_cast<Float<W>>((bits & is_visible) | (lowest & ~is_visible)));
  }
}

template <int W>
MOESERVE_INLINE float scalar_exp2(float x) {
  return exp2_of_nonpositive<W, 6>(broadcast<W>(x))[0];
}

// Add the biases of a tile's queries to their scores, times `unit`.
template <typename Element>
MOESERVE_INLINE void add_biases(const Tile& tile, float unit) {
  for (int r = 0; r < tile.num_queries; ++r) {
    const auto* bias = elements_of<Element>(tile.biases[r]);
    float* scores = tile.scores + r * kBlock;
    const int64_t own = tile.own_positions[r];
    const int64_t begin = std::max<int64_t>(tile.visible[r].begin, own - tile.num_distances + 1);
    const int64_t end = std::min<int64_t>(tile.visible[r].end, own + 1);
    for (int64_t at = begin; at < end; ++at) scores[at] += widen(bias[own - at]) * unit;
  }
}

// Convert the scores of a tile to weights. The largest scores of all queries are found first. Otherwise the processor
// would wait for each of them, because its window of instructions is shorter than the weights of one query. With
// kScales, scores must still be multiplied by the tile's factor.
template <typename L, bool kScales = false>
MOESERVE_INLINE void weigh(const Tile& tile) {
  using Products = typename L::Products;
  constexpr int W = L::W;
  const Range range = tile.range;
  if (tile.biases != nullptr) add_biases<typename L::Element>(tile, kScales ? kLog2E / tile.factor : kLog2E);
  const Float<W> scale = broadcast<W>(kScales ? tile.factor : 1.0f);
  float* all_largest = tile.factors;  // until the factors are known
  for (int r = 0; r < tile.num_queries; ++r) {
    float* scores = tile.scores + r * kBlock;
    const Range visible = tile.visible[r];
    if (visible.begin > range.begin || visible.end < range.end) mask<W>(scores, range, visible);
    Float<W> top = broadcast<W>(tile.states.largest[r]);
    for (int at = range.begin; at < range.end; at += W) {
      const Float<W> score = load<W>(scores + at);
      top = larger<W>(kScales ? score * scale : score, top);
    }
    all_largest[r] = largest_lane<W>(top);
  }
  for (int r = 0; r < tile.num_queries; ++r) {
    const float* scores = tile.scores + r * kBlock;
    const float largest = all_largest[r];
    auto* weights = static_cast<typename L::Word*>(tile.weights) + r * L::kWeights;
    const Float<W> subtracted = broadcast<W>(largest);
    Float<W> total{};
    for (int at = range.begin; at < range.end; at += L::kPerWord * W) {
      Float<W> vectors[L::kPerWord];
      MOESERVE_UNROLL
      for (int i = 0; i < L::kPerWord; ++i) {
        const Float<W> score = load<W>(scores + at + i * W);
        vectors[i] =
            exp2_of_nonpositive<W, Products::kExponentialDegree>((kScales ? score * scale : score) - subtracted);
      }
      const auto words = Products::pack(vectors);
      std::memcpy(weights + at / L::kPerWord, &words, sizeof(words));
      Products::add(total, words, Products::ones());
    }
    const float factor = scalar_exp2<W>(tile.states.largest[r] - largest);
    tile.factors[r] = factor;
    tile.states.weight_sums[r] = tile.states.weight_sums[r] * factor + sum_lanes<W>(total);
    tile.states.largest[r] = largest;
  }
}

// Compute values[r] = values[r] * factors[r] + sums[r] for the first `num_vectors` vectors.
template <int W, int kRows, int kVectors>
MOESERVE_INLINE void add_sums(const Float<W> (&sums)[kRows][kVectors], int num_vectors, const float* factors,
                              float* values, int64_t values_stride) {
  MOESERVE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const Float<W> factor = broadcast<W>(factors[r]);
    MOESERVE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      if (v >= num_vectors) continue;
      float* target = values + r * values_stride + v * W;
      store<W>(target, load<W>(target) * factor + sums[r][v]);
    }
  }
}

// Return the steps of a range of positions.
template <typename L>
MOESERVE_INLINE Range steps_of(Range range) {
  return {range.begin / L::kPerWord, (range.end + L::kPerWord - 1) / L::kPerWord};
}

template <typename L, int kRows, int kVectors>
MOESERVE_INLINE void add_packed_vectors(const Tile& tile, Range steps, const typename L::Word* strip, float* values,
                                        int64_t values_stride) {
  Float<L::W> sums[kRows][kVectors];
  multiply<typename L::Products, kRows, kVectors>(static_cast<const typename L::Word*>(tile.weights) + steps.begin,
                                                  L::kWeights, strip, steps.end - steps.begin, sums);
  add_sums<L::W, kRows, kVectors>(sums, kVectors, tile.factors, values, values_stride);
}

template <typename L, int kRows>
MOESERVE_INLINE void add_packed(const Tile& tile, int strip, int value_size, int64_t values_stride) {
  constexpr int W = L::W;
  constexpr int kMost = L::Products::kVectors;
  const Range steps = steps_of<L>(tile.seen);
  const auto* packed =
      static_cast<const typename L::Word*>(tile.packed) + int64_t{strip} * L::kValueStrip + steps.begin * L::kStrip;
  float* values = tile.states.values + strip * L::kStrip;
  const int num_vectors = std::min(kMost, (value_size - strip * L::kStrip + W - 1) / W);
  if (num_vectors == kMost) {
    add_packed_vectors<L, kRows, kMost>(tile, steps, packed, values, values_stride);
    return;
  }
  int v = 0;
  if (num_vectors >= 2) {
    add_packed_vectors<L, kRows, 2>(tile, steps, packed, values, values_stride);
    v = 2;
  }
  if (v < num_vectors) {
    add_packed_vectors<L, kRows, 1>(tile, steps, packed + v * W, values + v * W, values_stride);
  }
}

// Compute the same sums with values read in place: for kVectors vectors from element h on, or for the last elements.
template <typename L, int kRows, int kVectors, bool kLast>
MOESERVE_INLINE void add_vectors_in_place(const Tile& tile, int h, int value_size, int64_t values_stride) {
  using Products = typename L::Products;
  using Element = typename L::Element;
  constexpr int W = L::W;
  constexpr int kLoads = kVectors / L::kPerWord;
  static_assert(!kLast || kLoads == 1);
  const Range steps = steps_of<L>(tile.seen);
  const auto* weights = static_cast<const typename L::Word*>(tile.weights);
  Float<W> sums[kRows][kVectors];
  MOESERVE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    MOESERVE_UNROLL
    for (int v = 0; v < kVectors; ++v) sums[r][v] = Float<W>{};
  }
  for (int step = steps.begin; step < steps.end; ++step) {
    const void* const* rows = tile.values + step * L::kPerWord;
    prefetch(tile.values_ahead, step * L::kPerWord, L::kPerWord, h * sizeof(Element), kVectors * W * sizeof(Element));
    typename L::Words words[kLoads][L::kPerWord];
    if constexpr (kLast) {
      load_last_values<L>(rows, h, value_size, words[0]);
    } else {
      MOESERVE_UNROLL
      for (int i = 0; i < kLoads; ++i) {
        load_values<W>(rows, h + i * L::kPerWord * W, words[i], elements_of<Element>(nullptr));
      }
    }
    MOESERVE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const auto weight = Products::broadcast_word(weights + r * L::kWeights + step);
      MOESERVE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        Products::add(sums[r][v], words[v / L::kPerWord][v % L::kPerWord], weight);
      }
    }
  }
  const int num_vectors = kLast ? (value_size - h + W - 1) / W : kVectors;
  add_sums<W, kRows, kVectors>(sums, num_vectors, tile.factors, tile.states.values + h, values_stride);
}

template <typename L, int kRows>
MOESERVE_INLINE void add_in_place(const Tile& tile, int value_size, int64_t values_stride) {
  constexpr int kLoad = L::kPerWord * L::W;  // elements
  int h = 0;
  for (; h + L::kStrip <= value_size; h += L::kStrip) {
    add_vectors_in_place<L, kRows, L::Products::kVectors, false>(tile, h, value_size, values_stride);
  }
  for (; h + kLoad <= value_size; h += kLoad) {
    add_vectors_in_place<L, kRows, L::kPerWord, false>(tile, h, value_size, values_stride);
  }
  if (h < value_size) add_vectors_in_place<L, kRows, L::kPerWord, true>(tile, h, value_size, values_stride);
}

template <int W>
MOESERVE_INLINE void merge(const States& merged, const States& next, int num_queries, int64_t values_stride) {
  for (int q = 0; q < num_queries; ++q) {
    const float largest = std::max(merged.largest[q], next.largest[q]);
    const float factor = scalar_exp2<W>(merged.largest[q] - largest);
    const float next_factor = scalar_exp2<W>(next.largest[q] - largest);
    merged.largest[q] = largest;
    // Storing the second product forces its rounding. Otherwise the compiler could fuse either product with the sum,
    // and the result would depend on its choice.
    const float next_sum = next.weight_sums[q] * next_factor;
    next.weight_sums[q] = next_sum;
    merged.weight_sums[q] = merged.weight_sums[q] * factor + next_sum;
    float* values = merged.values + q * values_stride;
    float* next_values = next.values + q * values_stride;
    for (int64_t h = 0; h < values_stride; h += W) {
      const Float<W> added = load<W>(next_values + h) * broadcast<W>(next_factor);
      store<W>(next_values + h, added);
      store<W>(values + h, load<W>(values + h) * broadcast<W>(factor) + added);
    }
  }
}

template <int W, typename Element>
MOESERVE_INLINE void finish(const States& state, const float* sink, int value_size, Element* out) {
  float factor = 1.0f;
  float weight_sum = *state.weight_sums;
  if (sink != nullptr) {
    const float score = *sink * kLog2E;
    const float largest = std::max(*state.largest, score);
    factor = scalar_exp2<W>(*state.largest - largest);
    weight_sum = weight_sum * factor + scalar_exp2<W>(score - largest);
  }
  factor /= weight_sum;
  for (int h = 0; h < value_size; ++h)
    assign(out + h, state.values[h] * factor + 0.0f);  // + 0.0f avoids negative zeros
}

template <int kNumTiles>
constexpr BlockKernels with_tiles(BlockKernels kernels, const TileKernels (&tiles)[kNumTiles]) {
  kernels.tiles = tiles;
  kernels.num_tiles = kNumTiles;
  return kernels;
}

// Define the template Name<Products, Element> with the kernels of an instruction set, which TARGET enables. They are
// separate functions because target attributes apply to functions.
#define MOESERVE_BLOCK_KERNELS(Name, TARGET)                                                                        \
  template <typename Products, typename Element>                                                                    \
  struct Name {                                                                                                     \
    using L = Layout<Products, Element>;                                                                            \
    using Word = typename Products::Word;                                                                           \
    TARGET static void decode_float8(const Float8Rows& rows, int size) {                                            \
      moeserve::decode_float8<Products::W, Element>(rows, size);                                                    \
    }                                                                                                               \
    TARGET static void copy_query(const void* query, int head_size, void* words) {                                  \
      moeserve::copy_query(elements_of<Element>(query), head_size, L::key_steps(head_size),                         \
                           static_cast<Word*>(words));                                                              \
    }                                                                                                               \
    TARGET static void pack_keys(const void* const* rows, const PrefetchRows& ahead, Range range, int head_size,    \
                                 void* packed) {                                                                    \
      moeserve::pack_keys<L>(rows, ahead, range, head_size, static_cast<Word*>(packed));                            \
    }                                                                                                               \
    TARGET static void pack_values(const void* const* rows, const PrefetchRows& ahead, Range range, int value_size, \
                                   void* packed) {                                                                  \
      moeserve::pack_values<L>(rows, ahead, range, value_size, static_cast<Word*>(packed));                         \
    }                                                                                                               \
    TARGET static bool all_finite(const void* const* rows, Range range, int value_size) {                           \
      return moeserve::all_finite<Element>(rows, range, value_size);                                                \
    }                                                                                                               \
    template <int kRows>                                                                                            \
    TARGET static void weigh_packed(const Tile& tile, int head_size) {                                              \
      moeserve::score_packed<L, kRows>(tile, head_size);                                                            \
      moeserve::weigh<L>(tile);                                                                                     \
    }                                                                                                               \
    template <int kRows>                                                                                            \
    TARGET static void weigh_in_place(const Tile& tile, int head_size) {                                            \
      moeserve::score_in_place<L, kRows>(tile, head_size);                                                          \
      moeserve::weigh<L>(tile);                                                                                     \
    }                                                                                                               \
    template <int kRows>                                                                                            \
    TARGET static void add_packed(const Tile& tile, int strip, int value_size, int64_t values_stride) {             \
      moeserve::add_packed<L, kRows>(tile, strip, value_size, values_stride);                                       \
    }                                                                                                               \
    template <int kRows>                                                                                            \
    TARGET static void add_in_place(const Tile& tile, int value_size, int64_t values_stride) {                      \
      moeserve::add_in_place<L, kRows>(tile, value_size, values_stride);                                            \
    }                                                                                                               \
    template <int kRows>                                                                                            \
    TARGET static void add_positive(const Tile& tile, int head_size, const float* weights, float* sums) {           \
      moeserve::for_vectors<L>(tile, head_size, PositiveSums<L, kRows>{weights, sums});                             \
    }                                                                                                               \
    template <int kRows>                                                                                            \
    TARGET static void score(const Tile& tile, int head_size) {                                                     \
      moeserve::score_packed<L, kRows>(tile, head_size);                                                            \
    }                                                                                                               \
    TARGET static void merge(const States& merged, const States& next, int num_queries, int64_t values_stride) {    \
      moeserve::merge<Products::W>(merged, next, num_queries, values_stride);                                       \
    }                                                                                                               \
    TARGET static void finish(const States& state, const float* sink, int value_size, void* out) {                  \
      moeserve::finish<Products::W>(state, sink, value_size, static_cast<Element*>(out));                           \
    }                                                                                                               \
    template <int kRows>                                                                                            \
    static constexpr TileKernels tile_kernels{kRows,                                                                \
                                              weigh_packed<kRows>,                                                  \
                                              add_packed<kRows>,                                                    \
                                              weigh_in_place<kRows>,                                                \
                                              add_in_place<kRows>,                                                  \
                                              add_positive<kRows>,                                                  \
                                              score<kRows>};                                                        \
    static constexpr TileKernels tiles[] = {tile_kernels<6>, tile_kernels<4>, tile_kernels<2>, tile_kernels<1>};    \
    static constexpr BlockKernels without_tiles{Products::W,                                                        \
                                                Products::kVectors,                                                 \
                                                Products::kPerWord,                                                 \
                                                L::kPerLoad,                                                        \
                                                Products::kPerWord * Products::W,                                   \
                                                Products::kStepGroup,                                               \
                                                decode_float8,                                                      \
                                                copy_query,                                                         \
                                                pack_keys,                                                          \
                                                pack_values,                                                        \
                                                all_finite,                                                         \
                                                merge,                                                              \
                                                finish};                                                            \
    static constexpr BlockKernels kernels = with_tiles(without_tiles, tiles);                                       \
  }

}  // namespace moeserve
