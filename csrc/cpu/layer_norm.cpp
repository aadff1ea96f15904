// LayerNorm. Each row is read three times, but only once from memory.

#include "layer_norm.h"

#include <algorithm>
#include <cmath>

#include "isa.h"
#include "lanes.h"
#include "rows.h"

namespace moeserve {

namespace {

// Call use(vectors, first element, number of elements) for the elements of a row in order, 2 * W at a time.
template <int W, typename Element, typename Use>
MOESERVE_INLINE void for_pairs(const Element* row, int64_t width, const Use& use) {
  const int64_t last = width / (2 * W) * (2 * W);  // start of the incomplete last vectors
  for (int64_t d = 0; d < last; d += 2 * W) use(load_pair<W>(row + d), d, 2 * W);
  if (last < width) use(load_first<W>(row + last, static_cast<int>(width - last)), last, width - last);
}

template <int W, typename Element>
MOESERVE_INLINE void norm_row(const Element* row, const Element* weight, const Element* bias, int64_t width,
                              float epsilon, Element* out) {
  Pair<W> sums{};
  for_pairs<W>(row, width, [&](const Pair<W>& x, int64_t, int64_t) __attribute__((always_inline)) {
    sums.first += x.first;
    sums.second += x.second;
  });
  const float mean = sum_lanes<W>(sums.first + sums.second) / static_cast<float>(width);
  float squares = 0.0f;
  Pair<W> square_sums{};
  for_pairs<W>(row, width, [&](const Pair<W>& x, int64_t, int64_t count) __attribute__((always_inline)) {
    if (count < 2 * W) return;
    const Pair<W> deviation{x.first - mean, x.second - mean};
    square_sums.first += deviation.first * deviation.first;
    square_sums.second += deviation.second * deviation.second;
  });
  for (int64_t d = width / (2 * W) * (2 * W); d < width; ++d) {  // lanes beyond the row would add the mean
    const float deviation = widen(row[d]) - mean;
    squares += deviation * deviation;
  }
  const float variance = (sum_lanes<W>(square_sums.first + square_sums.second) + squares) / static_cast<float>(width);
  const float factor = 1.0f / std::sqrt(variance + epsilon);
  for_pairs<W>(row, width, [&](const Pair<W>& x, int64_t d, int64_t count) __attribute__((always_inline)) {
    const bool is_whole = count == 2 * W;
    const Pair<W> weights = is_whole ? load_pair<W>(weight + d) : load_first<W>(weight + d, static_cast<int>(count));
    const Pair<W> biases = is_whole ? load_pair<W>(bias + d) : load_first<W>(bias + d, static_cast<int>(count));
    const Pair<W> normed{(x.first - mean) * factor * weights.first + biases.first,
                         (x.second - mean) * factor * weights.second + biases.second};
    const Pair<W> rounded = round_to<W>(out, normed);
    is_whole ? store_part<W, true>(out + d, rounded, count) : store_part<W, false>(out + d, rounded, count);
  });
}

template <int W, typename Element>
MOESERVE_INLINE void norm_rows(const LayerNorm& norm, int64_t first, int64_t last) {
  const auto* weight = static_cast<const Element*>(norm.weight);
  const auto* bias = static_cast<const Element*>(norm.bias);
  for (int64_t row = first; row < last; ++row) {
    norm_row<W, Element>(static_cast<const Element*>(norm.rows) + row * norm.row_stride, weight, bias, norm.width,
                         norm.epsilon, static_cast<Element*>(norm.out) + row * norm.out_stride);
  }
}

MOESERVE_DEFINE_TYPED_VARIANTS(norm_rows, norm.type, (const LayerNorm& norm, int64_t first, int64_t last),
                               (norm, first, last))

}  // namespace

void layer_norm(const LayerNorm& norm) {
  const auto run = choose_norm_rows_of_type(current_isa());
  for_rows(norm.num_rows, 2 * norm.width * element_bytes(norm.type),
           [&](int64_t first, int64_t last) { run(norm, first, last); });
}

}  // namespace moeserve
