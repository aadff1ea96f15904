// RMSNorm. Each row is read once from memory, and once more from the cache.

#include "rms_norm.h"

#include <cmath>

#include "isa.h"
#include "lanes.h"
#include "rows.h"

namespace moeserve {

namespace {

// The sums of squares of a row, per lane.
template <int W>
struct Squares {
  Float<W> first = {};
  Float<W> second = {};
};

// Add `update` to 2 * W elements, or to the last `count` elements of a row, and add their squares to `squares`.
template <int W, bool kAdds, bool kIsWhole, typename Element>
MOESERVE_INLINE void add_squares(const Element* x, const Element* update, Element* sum, int64_t count,
                                 Squares<W>& squares) {
  Pair<W> pair = load_part<W, kIsWhole>(x, count);
  if constexpr (kAdds) {
    const Pair<W> more = load_part<W, kIsWhole>(update, count);
    pair = round_to<W>(x, Pair<W>{pair.first + more.first, pair.second + more.second});
    store_part<W, kIsWhole>(sum, pair, count);
  }
  squares.first += pair.first * pair.first;
  squares.second += pair.second * pair.second;
}

template <int W, bool kIsWhole, typename Element>
MOESERVE_INLINE void scale(const Element* source, const Element* weight, float factor, Element* out, int64_t count) {
  const Pair<W> pair = load_part<W, kIsWhole>(source, count);
  const Pair<W> weights = load_part<W, kIsWhole>(weight, count);
  const Pair<W> scaled = round_to<W>(source, Pair<W>{pair.first * factor, pair.second * factor});
  const Pair<W> normed{scaled.first * weights.first, scaled.second * weights.second};
  store_part<W, kIsWhole>(out, round_to<W>(source, normed), count);
}

template <int W, bool kAdds, typename Element>
MOESERVE_INLINE void norm_row(const Element* x, const Element* update, const Element* weight, Element* sum,
                              Element* out, int64_t width, float epsilon) {
  const int64_t last = width / (2 * W) * (2 * W);  // start of the incomplete last vectors
  Squares<W> squares;
  for (int64_t d = 0; d < last; d += 2 * W) {
    add_squares<W, kAdds, true>(x + d, update + d, sum + d, 2 * W, squares);
  }
  if (last < width) add_squares<W, kAdds, false>(x + last, update + last, sum + last, width - last, squares);
  const float mean = sum_lanes<W>(squares.first + squares.second) / static_cast<float>(width);
  const float factor = 1.0f / std::sqrt(mean + epsilon);

  const Element* source = kAdds ? sum : x;
  for (int64_t d = 0; d < last; d += 2 * W) scale<W, true>(source + d, weight + d, factor, out + d, 2 * W);
  if (last < width) scale<W, false>(source + last, weight + last, factor, out + last, width - last);
}

template <typename Element>
Element* row_of(const HeadRows& rows, int64_t token, int64_t head) {
  return static_cast<Element*>(rows.data) + token * rows.token_stride + head * rows.head_stride;
}

template <int W, typename Element>
MOESERVE_INLINE void norm_rows(const RmsNorm& norm, int64_t first, int64_t last) {
  const auto* weight = static_cast<const Element*>(norm.weight);
  int64_t t = first / norm.num_heads, n = first % norm.num_heads;
  for (int64_t row = first; row < last; ++row) {
    const Element* x = row_of<Element>(norm.x, t, n);
    Element* out = row_of<Element>(norm.out, t, n);
    if (norm.update.data == nullptr) {
      norm_row<W, false, Element>(x, x, weight, out, out, norm.width, norm.epsilon);
    } else {
      norm_row<W, true, Element>(x, row_of<Element>(norm.update, t, n), weight, row_of<Element>(norm.sum, t, n), out,
                                 norm.width, norm.epsilon);
    }
    if (++n == norm.num_heads) {
      n = 0;
      ++t;
    }
  }
}

MOESERVE_DEFINE_TYPED_VARIANTS(norm_rows, norm.type, (const RmsNorm& norm, int64_t first, int64_t last),
                               (norm, first, last))

}  // namespace

void rms_norm(const RmsNorm& norm) {
  const auto run = choose_norm_rows_of_type(current_isa());
  const int64_t bytes_per_row = norm.width * element_bytes(norm.type) * (norm.update.data == nullptr ? 2 : 4);
  for_rows(norm.num_tokens * norm.num_heads, bytes_per_row,
           [&](int64_t first, int64_t last) { run(norm, first, last); });
}

}  // namespace moeserve
