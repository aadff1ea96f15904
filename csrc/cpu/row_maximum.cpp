// The maximum of each row: first block by block, and then its index in the first block that contains it.

#include "row_maximum.h"

#include <limits>

#include "isa.h"
#include "lanes.h"
#include "rows.h"

namespace moeserve {

namespace {

constexpr int64_t kBlock = 1024;  // elements, a multiple of 2 * W

// Return the largest of `count` numbers, or infinity if one of them is NaN.
template <int W, typename Element>
MOESERVE_INLINE float largest_or_infinity(const Element* numbers, int64_t count) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Float<W> first = broadcast<W>(-kInfinity), second = first;
  int64_t i = 0;
  for (; i + 2 * W <= count; i += 2 * W) {
    const Pair<W> pair = load_pair<W>(numbers + i);
    first = first >= pair.first ? first : (pair.first == pair.first ? pair.first : broadcast<W>(kInfinity));
    second = second >= pair.second ? second : (pair.second == pair.second ? pair.second : broadcast<W>(kInfinity));
  }
  float largest = largest_lane<W>(larger<W>(first, second));
  for (; i < count; ++i) {
    const float number = widen(numbers[i]);
    if (number != number) return kInfinity;
    largest = number > largest ? number : largest;
  }
  return largest;
}

template <int W, typename Element>
MOESERVE_INLINE void find_maximum(const Element* row, int64_t width, float* largest, int64_t* index) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  float best = largest_or_infinity<W>(row, std::min(width, kBlock));
  int64_t block = 0;
  for (int64_t start = kBlock; start < width && best < kInfinity; start += kBlock) {
    const float of_block = largest_or_infinity<W>(row + start, std::min(width - start, kBlock));
    if (of_block > best) {
      best = of_block;
      block = start;
    }
  }
  if (best == kInfinity) {  // the row has an infinity or a NaN, which is larger
    for (int64_t i = 0; i < width; ++i) {
      const float number = widen(row[i]);
      if (number != number) {
        *largest = number;
        *index = i;
        return;
      }
    }
  }
  *largest = best;
  *index = block;
  while (widen(row[*index]) != best) ++*index;
}

template <int W, typename Element>
MOESERVE_INLINE void find_maxima(const RowMaximum& maximum, int64_t first, int64_t last) {
  for (int64_t r = first; r < last; ++r) {
    const Element* row = static_cast<const Element*>(maximum.rows) + r * maximum.row_stride;
    find_maximum<W>(row, maximum.width, maximum.largest + r, maximum.indices + r);
  }
}

MOESERVE_DEFINE_TYPED_VARIANTS(find_maxima, maximum.type, (const RowMaximum& maximum, int64_t first, int64_t last),
                               (maximum, first, last))

}  // namespace

void find_row_maximum(const RowMaximum& maximum) {
  const auto run = choose_find_maxima_of_type(current_isa());
  for_rows(maximum.num_rows, maximum.width * element_bytes(maximum.type),
           [&](int64_t first, int64_t last) { run(maximum, first, last); });
}

}  // namespace moeserve
