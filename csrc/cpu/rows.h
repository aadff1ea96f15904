// Loading, rounding and storing rows in both element types, and the division of rows among threads.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "lanes.h"
#include "parallel.h"

namespace moeserve {

constexpr int64_t kRowItemBytes = 16 * 1024;  // work per item; less work does not justify a second thread

// Call work(first, last) for ranges that together are [0, num_rows), on several threads if there is enough work. `work`
// must compute the same bytes for a row in any range.
template <typename Work>
void for_rows(int64_t num_rows, int64_t bytes_per_row, const Work& work) {
  const int64_t rows_per_item = std::max<int64_t>(1, kRowItemBytes / std::max<int64_t>(1, bytes_per_row));
  const int64_t num_items = (num_rows + rows_per_item - 1) / rows_per_item;
  if (num_items <= 2) {
    work(int64_t{0}, num_rows);
  } else {
    parallel_for(num_items,
                 [&](int64_t item) { work(item * rows_per_item, std::min(num_rows, (item + 1) * rows_per_item)); });
  }
}

// Sum all lanes, in an order that depends only on W.
template <int W, int kHalf = W / 2>
MOESERVE_INLINE float sum_lanes(Float<W> lanes) {
  if constexpr (kHalf == 0) {
    return lanes[0];
  } else {
    return sum_lanes<W, kHalf / 2>(fold<W, kHalf>(lanes, lanes, std::make_integer_sequence<int, W>{}));
  }
}

template <int W, int kBy, int... kLane>
MOESERVE_INLINE Float<W> rotate(Float<W> lanes, std::integer_sequence<int, kLane...>) {
  return pick<W, ((kLane + kBy) % W)...>(lanes, lanes);
}

// Return the largest lane. No lane may be NaN.
template <int W, int kHalf = W / 2>
MOESERVE_INLINE float largest_lane(Float<W> lanes) {
  if constexpr (kHalf == 0) {
    return lanes[0];
  } else {
    const Float<W> others = rotate<W, kHalf>(lanes, std::make_integer_sequence<int, W>{});
    return largest_lane<W, kHalf / 2>(larger<W>(lanes, others));
  }
}

// Round to the element type, ties to even. The result is float32.
template <int W>
MOESERVE_INLINE Float<W> round_to(const float*, Float<W> lanes) {
  return lanes;
}
template <int W>
MOESERVE_INLINE Float<W> round_to(const BFloat16*, Float<W> lanes) {
  using UInt = typename Vector<W>::UInt;
  const UInt bits = reinterpret_cast<UInt>(lanes);
  const UInt rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
  const UInt quiet_nan = bits | 0x400000u;
  return reinterpret_cast<Float<W>>((lanes == lanes ? rounded : quiet_nan) & 0xFFFF0000u);
}

template <int W, typename Element>
MOESERVE_INLINE Pair<W> round_to(const Element* type, const Pair<W>& pair) {
  return {round_to<W>(type, pair.first), round_to<W>(type, pair.second)};
}

// Round and store W consecutive elements in order.
template <int W>
MOESERVE_INLINE void store_in_order(float* target, Float<W> lanes) {
  store<W>(target, lanes);
}
template <int W>
MOESERVE_INLINE void store_in_order(BFloat16* target, Float<W> lanes) {
  using Halves = typename Vector<W>::HalfAsMany;
  using UInt = typename Vector<W>::UInt;
  const UInt bits = reinterpret_cast<UInt>(round_to<W>(target, lanes)) >> 16;
  const Halves halves = __builtin_convertvector(bits, Halves);
  std::memcpy(target, &halves, sizeof(halves));
}

// The inverse of load_pair, for numbers that have already been rounded to the element type.
template <int W>
MOESERVE_INLINE void store_pair(float* target, const Pair<W>& pair) {
  store<W>(target, pair.first);
  store<W>(target + W, pair.second);
}
template <int W>
MOESERVE_INLINE void store_pair(BFloat16* target, const Pair<W>& pair) {
  using UInt = typename Vector<W>::UInt;
  const UInt words = (reinterpret_cast<UInt>(pair.first) >> 16) | reinterpret_cast<UInt>(pair.second);
  std::memcpy(target, &words, sizeof(words));
}

// load_pair and store_pair, or, if kIsWhole is false, the same for the remaining `count` < 2 * W elements of a row.
template <int W, bool kIsWhole, typename Element>
MOESERVE_INLINE Pair<W> load_part(const Element* source, [[maybe_unused]] int64_t count) {
  if constexpr (kIsWhole) {
    return load_pair<W>(source);
  } else {
    return load_first<W>(source, static_cast<int>(count));
  }
}
template <int W, bool kIsWhole, typename Element>
MOESERVE_INLINE void store_part(Element* target, const Pair<W>& pair, [[maybe_unused]] int64_t count) {
  if constexpr (kIsWhole) {
    store_pair<W>(target, pair);
  } else {
    Element elements[2 * W];
    store_pair<W>(elements, pair);
    for (int64_t i = 0; i < count; ++i) target[i] = elements[i];
  }
}

}  // namespace moeserve
