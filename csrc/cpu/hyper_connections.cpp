// The products of the streams with the map come first, divided among threads by tokens and coefficients; then each
// token's coefficients and the sum of its streams.

#include "hyper_connections.h"

#include <algorithm>
#include <cmath>

#include "isa.h"
#include "lanes.h"
#include "parallel.h"
#include "partial_lanes.h"
#include "rows.h"

namespace moeserve {

namespace {

constexpr int64_t kTokensPerItem = 8;
constexpr int kCoefficientsPerItem = 8;
constexpr int kMaxCoefficients = kMaxStreams * (2 + kMaxStreams);
constexpr int64_t kWorthThreads = 1 << 18;  // products that justify a second thread

// Write the products of some tokens with the rows [first, last) of the map.
template <int W, typename Element>
MOESERVE_INLINE void multiply_map(const StreamCollapse& step, int64_t first_token, int64_t last_token, int64_t first,
                                  int64_t last) {
  const int64_t size = step.num_streams * step.width;
  const float* rows[kCoefficientsPerItem];  // the last one is repeated, and its additional products are dropped
  for (int c = 0; c < kCoefficientsPerItem; ++c) rows[c] = step.map + std::min(first + c, last - 1) * size;
  for (int64_t t = first_token; t < last_token; ++t) {
    const Element* streams = static_cast<const Element*>(step.streams) + t * size;
    Float<W> sums[kCoefficientsPerItem] = {};
    for (int64_t d = 0; d < size; d += W) {
      const int64_t count = std::min<int64_t>(W, size - d);
      const Float<W> lanes = load_lanes<W>(streams + d, count);
      MOESERVE_UNROLL
      for (int c = 0; c < kCoefficientsPerItem; ++c) sums[c] += lanes * load_lanes<W>(rows[c] + d, count);
    }
    for (int64_t c = first; c < last; ++c) {
      step.coefficients[t * step.num_coefficients + c] = sum_lanes<W>(sums[c - first]);
    }
  }
}

inline float sigmoid_of(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Divide the columns of a matrix [S, S] by their sums.
inline void divide_columns(float* matrix, int64_t size, float epsilon) {
  for (int64_t k = 0; k < size; ++k) {
    float sum = 0.0f;
    for (int64_t j = 0; j < size; ++j) sum += matrix[j * size + k];
    for (int64_t j = 0; j < size; ++j) matrix[j * size + k] /= sum + epsilon;
  }
}

inline void divide_rows(float* matrix, int64_t size, float epsilon) {
  for (int64_t j = 0; j < size; ++j) {
    float sum = 0.0f;
    for (int64_t k = 0; k < size; ++k) sum += matrix[j * size + k];
    for (int64_t k = 0; k < size; ++k) matrix[j * size + k] /= sum + epsilon;
  }
}

// Turn the products of a token into coefficients.
inline void finish_coefficients(const StreamCollapse& step, float factor, float* coefficients) {
  const int64_t size = step.num_streams;
  for (int64_t c = 0; c < step.num_coefficients; ++c) {
    const int64_t kind = std::min<int64_t>(c / size, 2);
    const float x = coefficients[c] * factor * step.scales[kind] + step.base[c];
    if (kind == 0) coefficients[c] = sigmoid_of(x) + step.epsilon;
    if (kind == 1) coefficients[c] = step.output_factor * sigmoid_of(x) + step.output_epsilon;
    if (kind == 2) coefficients[c] = x;
  }
  if (step.num_coefficients <= 2 * size) return;
  float* matrix = coefficients + 2 * size;
  for (int64_t j = 0; j < size; ++j) {
    float* row = matrix + j * size;
    const float largest = *std::max_element(row, row + size);
    float sum = 0.0f;
    for (int64_t k = 0; k < size; ++k) sum += row[k] = std::exp(row[k] - largest);
    for (int64_t k = 0; k < size; ++k) row[k] = row[k] / sum + step.epsilon;
  }
  divide_columns(matrix, size, step.epsilon);
  for (int64_t i = 1; i < step.num_iterations; ++i) {
    divide_rows(matrix, size, step.epsilon);
    divide_columns(matrix, size, step.epsilon);
  }
}

template <int W, typename Element>
MOESERVE_INLINE void collapse_rows(const StreamCollapse& step, int64_t first, int64_t last) {
  const int64_t size = step.num_streams * step.width;
  for (int64_t t = first; t < last; ++t) {
    const Element* streams = static_cast<const Element*>(step.streams) + t * size;
    Float<W> squares = {};
    for (int64_t d = 0; d < size; d += W) {
      const Float<W> lanes = load_lanes<W>(streams + d, std::min<int64_t>(W, size - d));
      squares += lanes * lanes;
    }
    const float mean = sum_lanes<W>(squares) / static_cast<float>(size);
    float* coefficients = step.coefficients + t * step.num_coefficients;
    finish_coefficients(step, 1.0f / std::sqrt(mean + step.norm_epsilon), coefficients);
    Element* out = static_cast<Element*>(step.out) + t * step.width;
    for (int64_t d = 0; d < step.width; d += W) {
      const int64_t count = std::min<int64_t>(W, step.width - d);
      Float<W> sum = {};
      for (int64_t s = 0; s < step.num_streams; ++s) {
        sum += load_lanes<W>(streams + s * step.width + d, count) * coefficients[s];
      }
      store_lanes<W>(out + d, sum, count);
    }
  }
}

template <int W, typename Element>
MOESERVE_INLINE void expand_rows(const StreamExpansion& step, int64_t first, int64_t last) {
  const int64_t num_streams = step.num_streams, width = step.width;
  const bool has_matrix = step.num_coefficients > 2 * num_streams;
  for (int64_t t = first; t < last; ++t) {
    const Element* streams = static_cast<const Element*>(step.streams) + t * num_streams * width;
    const Element* update = static_cast<const Element*>(step.update) + t * width;
    Element* out = static_cast<Element*>(step.out) + t * num_streams * width;
    const float* after = step.coefficients + t * step.num_coefficients + num_streams;
    const float* matrix = after + num_streams;
    for (int64_t d = 0; d < width; d += W) {
      const int64_t count = std::min<int64_t>(W, width - d);
      const Float<W> added = load_lanes<W>(update + d, count);
      for (int64_t k = 0; k < num_streams; ++k) {
        Float<W> sum = added * after[k];
        if (!has_matrix) sum += load_lanes<W>(streams + k * width + d, count);
        for (int64_t j = 0; has_matrix && j < num_streams; ++j) {
          sum += load_lanes<W>(streams + j * width + d, count) * matrix[j * num_streams + k];
        }
        store_lanes<W>(out + k * width + d, sum, count);
      }
    }
  }
}

MOESERVE_DEFINE_TYPED_VARIANTS(multiply_map, step.type,
                               (const StreamCollapse& step, int64_t first_token, int64_t last_token, int64_t first,
                                int64_t last),
                               (step, first_token, last_token, first, last))
MOESERVE_DEFINE_TYPED_VARIANTS(collapse_rows, step.type, (const StreamCollapse& step, int64_t first, int64_t last),
                               (step, first, last))
MOESERVE_DEFINE_TYPED_VARIANTS(expand_rows, step.type, (const StreamExpansion& step, int64_t first, int64_t last),
                               (step, first, last))

}  // namespace

void collapse_streams(const StreamCollapse& step) {
  const auto multiply = choose_multiply_map_of_type(current_isa());
  const auto collapse = choose_collapse_rows_of_type(current_isa());
  const int64_t num_groups = (step.num_coefficients + kCoefficientsPerItem - 1) / kCoefficientsPerItem;
  const int64_t num_blocks = (step.num_tokens + kTokensPerItem - 1) / kTokensPerItem;
  const auto run = [&](int64_t item) {
    const int64_t block = item / num_groups, first = item % num_groups * kCoefficientsPerItem;
    multiply(step, block * kTokensPerItem, std::min(step.num_tokens, (block + 1) * kTokensPerItem), first,
             std::min(step.num_coefficients, first + kCoefficientsPerItem));
  };
  if (step.num_tokens * step.num_coefficients * step.num_streams * step.width < kWorthThreads) {
    for (int64_t item = 0; item < num_blocks * num_groups; ++item) run(item);
  } else {
    parallel_for(num_blocks * num_groups, run);
  }
  const int64_t bytes = step.num_streams * step.width * element_bytes(step.type);
  for_rows(step.num_tokens, bytes, [&](int64_t first, int64_t last) { collapse(step, first, last); });
}

void expand_streams(const StreamExpansion& step) {
  const auto expand = choose_expand_rows_of_type(current_isa());
  const int64_t bytes = 2 * step.num_streams * step.width * element_bytes(step.type);
  for_rows(step.num_tokens, bytes, [&](int64_t first, int64_t last) { expand(step, first, last); });
}

}  // namespace moeserve
