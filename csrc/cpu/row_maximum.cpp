// The largest number of each row: block by block, and then its place within the first block that has it.

#include "row_maximum.h"

#include <limits>

#include "isa.h"
#include "lanes.h"
#include "rows.h"

namespace moeserve {

namespace {

constexpr int64_t kBlock = 1024;  // elements, a multiple of 2 * W

template <int W>
MOESERVE_INLINE float largest_lane(Float<W> lanes) {
  float numbers[W];
  store<W>(numbers, lanes);
  float largest = numbers[0];
  for (int i = 1; i < W; ++i) largest = numbers[i] > largest ? numbers[i] : largest;
  return largest;
}

// The largest of `count` numbers, or infinity where one of them is NaN.
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
    const float number = widen(numbers + i);
    if (number != number) return kInfinity;
    largest = number > largest ? number : largest;
  }
  return largest;
}

template <int W, typename Element>
MOESERVE_INLINE void search_row(const Element* row, int64_t width, float* largest, int64_t* index) {
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
  if (best == kInfinity) {  // or NaN, which may come after an infinity
    for (int64_t i = 0; i < width; ++i) {
      const float number = widen(row + i);
      if (number != number) {
        *largest = number;
        *index = i;
        return;
      }
    }
  }
  *largest = best;
  *index = block;
  while (widen(row + *index) != best) ++*index;
}

template <int W, typename Element>
MOESERVE_INLINE void search_rows(const RowMaximum& search, int64_t first, int64_t last) {
  for (int64_t r = first; r < last; ++r) {
    const Element* row = static_cast<const Element*>(search.rows) + r * search.row_stride;
    search_row<W>(row, search.width, search.largest + r, search.indices + r);
  }
}

template <int W>
MOESERVE_INLINE void search_rows(const RowMaximum& search, int64_t first, int64_t last) {
  if (search.type == ElementType::kBFloat16) {
    search_rows<W, BFloat16>(search, first, last);
  } else {
    search_rows<W, float>(search, first, last);
  }
}

#if defined(MOESERVE_X86)
MOESERVE_TARGET_AVX512 void search_rows_avx512(const RowMaximum& search, int64_t first, int64_t last) {
  search_rows<16>(search, first, last);
}
MOESERVE_TARGET_AVX2 void search_rows_avx2(const RowMaximum& search, int64_t first, int64_t last) {
  search_rows<8>(search, first, last);
}
#endif
void search_rows_baseline(const RowMaximum& search, int64_t first, int64_t last) {
  search_rows<4>(search, first, last);
}

using SearchRows = void (*)(const RowMaximum&, int64_t first, int64_t last);

SearchRows choose_search_rows([[maybe_unused]] Isa isa) {
#if defined(MOESERVE_X86)
  return choose_version<SearchRows>(isa, search_rows_baseline, search_rows_avx2, search_rows_avx512);
#else
  return search_rows_baseline;
#endif
}

}  // namespace

void find_row_maximum(const RowMaximum& search) {
  const SearchRows run = choose_search_rows(current_isa());
  for_rows(search.num_rows, search.width * element_bytes(search.type),
           [&](int64_t first, int64_t last) { run(search, first, last); });
}

}  // namespace moeserve
