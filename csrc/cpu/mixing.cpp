// Row operations of Zaya and Inkling 2, divided by rows. Sums over a head have one order for each vector width.

#include "mixing.h"

#include <algorithm>
#include <cmath>

#include "isa.h"
#include "partial_lanes.h"
#include "rows.h"

namespace moeserve {

namespace {

constexpr float kSmallestLength = 1.1920929e-7f;
constexpr int64_t kGeluPart = 256;  // elements of a row of `gelu`
constexpr float kAddedLength = 1e-6f;
constexpr float kSumEpsilon = 1e-6f;

template <int W, typename Element>
MOESERVE_INLINE Float<W> term(const Element* x, const float* scale, const float* bias, int64_t lanes) {
  Float<W> value = load_lanes<W>(x, lanes);
  if (bias != nullptr) value += load_lanes<W>(bias, lanes);
  if (scale != nullptr) value *= load_lanes<W>(scale, lanes);
  return value;
}

// Return the vector at an offset, or null.
inline const float* at(const float* vector, int64_t offset) { return vector == nullptr ? nullptr : vector + offset; }

template <int W, typename Element>
MOESERVE_INLINE void add_rows(const RowSum& sum, int64_t first, int64_t last) {
  for (int64_t t = first; t < last; ++t) {
    const Element* a = static_cast<const Element*>(sum.a) + t * sum.width;
    const Element* b = sum.b == nullptr ? nullptr : static_cast<const Element*>(sum.b) + t * sum.width;
    Element* out = static_cast<Element*>(sum.out) + t * sum.width;
    for (int64_t d = 0; d < sum.width; d += W) {
      const int64_t lanes = std::min<int64_t>(W, sum.width - d);
      Float<W> value = term<W>(a + d, at(sum.a_scale, d), at(sum.a_bias, d), lanes);
      if (b != nullptr) value += term<W>(b + d, at(sum.b_scale, d), at(sum.b_bias, d), lanes);
      store_lanes<W>(out + d, value, lanes);
    }
  }
}

MOESERVE_DEFINE_TYPED_VARIANTS(add_rows, sum.type, (const RowSum& sum, int64_t first, int64_t last), (sum, first, last))

template <int W, typename Element>
MOESERVE_INLINE void gelu_range(const Gelu& step, int64_t first, int64_t last) {
  const Element* x = static_cast<const Element*>(step.x);
  Element* out = static_cast<Element*>(step.out);
  for (int64_t i = first; i < last; ++i) {
    const float value = widen(x[i]);
    assign(out + i, 0.5f * value * (1.0f + std::erf(value * 0.70710678f)));
  }
}

MOESERVE_DEFINE_TYPED_VARIANTS(gelu_range, step.type, (const Gelu& step, int64_t first, int64_t last),
                               (step, first, last))

// Write a head of `size` values with the length factor * sqrt(size).
template <int W, typename Element>
MOESERVE_INLINE void write_normalized(const float* head, int64_t size, float factor, Element* out) {
  Float<W> squares = {};
  for (int64_t i = 0; i < size; i += W) {
    const Float<W> lanes = load_lanes<W>(head + i, std::min<int64_t>(W, size - i));
    squares += lanes * lanes;
  }
  factor *= std::sqrt(static_cast<float>(size)) / std::max(std::sqrt(sum_lanes<W>(squares)), kSmallestLength);
  for (int64_t i = 0; i < size; i += W) {
    const int64_t lanes = std::min<int64_t>(W, size - i);
    store_lanes<W>(out + i, load_lanes<W>(head + i, lanes) * factor, lanes);
  }
}

template <int W, typename Element>
MOESERVE_INLINE void mix_tokens(const HeadMixing& step, int64_t first, int64_t last) {
  alignas(64) float local[kMaxMixedHead], means[kMaxMixedHead];
  const int64_t size = step.head_size, group = step.num_heads / step.num_key_heads;
  const int64_t width = (step.num_heads + step.num_key_heads) * size;
  for (int64_t t = first; t < last; ++t) {
    const Element* query = static_cast<const Element*>(step.projected) + t * step.row_stride;
    const Element* convolved = static_cast<const Element*>(step.convolved) + t * width;
    Element* out = static_cast<Element*>(step.out) + t * width;
    for (int64_t g = 0; g < step.num_key_heads; ++g) {
      const Element* key = query + (step.num_heads + g) * size;
      std::fill_n(means, size, 0.0f);
      for (int64_t n = g * group; n < (g + 1) * group; ++n) {
        for (int64_t i = 0; i < size; i += W) {
          const int64_t lanes = std::min<int64_t>(W, size - i);
          const Float<W> mean = (load_lanes<W>(query + n * size + i, lanes) + load_lanes<W>(key + i, lanes)) * 0.5f;
          store_lanes<W>(means + i, load_lanes<W>(means + i, lanes) + mean, lanes);
          store_lanes<W>(local + i, mean + load_lanes<W>(convolved + n * size + i, lanes), lanes);
        }
        write_normalized<W>(local, size, 1.0f, out + n * size);
      }
      const int64_t own = (step.num_heads + g) * size;
      for (int64_t i = 0; i < size; i += W) {
        const int64_t lanes = std::min<int64_t>(W, size - i);
        const Float<W> mean = load_lanes<W>(means + i, lanes) * (1.0f / static_cast<float>(group));
        store_lanes<W>(local + i, mean + load_lanes<W>(convolved + own + i, lanes), lanes);
      }
      write_normalized<W>(local, size, step.temperatures[g], out + own);
    }
  }
}

MOESERVE_DEFINE_TYPED_VARIANTS(mix_tokens, step.type, (const HeadMixing& step, int64_t first, int64_t last),
                               (step, first, last))

template <int W, typename Element>
MOESERVE_INLINE void limit_heads(const LengthLimit& step, int64_t first, int64_t last) {
  const int64_t size = step.head_size;
  for (int64_t row = first; row < last; ++row) {
    const int64_t t = row / step.num_heads, n = row % step.num_heads;
    const Element* x = static_cast<const Element*>(step.x) + t * step.token_stride + n * size;
    const float* scale = at(step.scale, n * size);
    Element* out = static_cast<Element*>(step.out) + row * size;
    Float<W> squares = {};
    for (int64_t i = 0; i < size; i += W) {
      const Float<W> value = term<W>(x + i, at(scale, i), nullptr, std::min<int64_t>(W, size - i));
      squares += value * value;
    }
    const float factor = step.limit / (std::sqrt(sum_lanes<W>(squares)) + kAddedLength);
    for (int64_t i = 0; i < size; i += W) {
      const int64_t lanes = std::min<int64_t>(W, size - i);
      const Float<W> value = term<W>(x + i, at(scale, i), nullptr, lanes);
      store_lanes<W>(out + i, factor < 1.0f ? value * factor : value, lanes);
    }
  }
}

MOESERVE_DEFINE_TYPED_VARIANTS(limit_heads, step.type, (const LengthLimit& step, int64_t first, int64_t last),
                               (step, first, last))

// Turn the products of the sums with a query into their weights: the softmax, times each sum's factor.
inline void weigh_sums(const float* factors, float scale, int64_t num_sums, float* weights) {
  for (int64_t s = 0; s < num_sums; ++s) weights[s] *= factors[s] * scale;
  const float largest = *std::max_element(weights, weights + num_sums);
  float total = 0.0f;
  for (int64_t s = 0; s < num_sums; ++s) total += weights[s] = std::exp(weights[s] - largest);
  for (int64_t s = 0; s < num_sums; ++s) weights[s] *= factors[s] / total;
}

template <int W, typename Element>
MOESERVE_INLINE void attend_tokens(const SumAttention& step, int64_t first, int64_t last) {
  const int64_t width = step.width, num_queries = step.num_queries;
  const float scale = 1.0f / std::sqrt(static_cast<float>(width));
  float factors[kMaxSums], weights[kMaxSumQueries][kMaxSums];
  for (int64_t t = first; t < last; ++t) {
    Element* sums = static_cast<Element*>(step.sums) + t * step.token_stride;
    Element* latest = sums + (step.num_sums - 1) * width;
    const Element* update = step.update == nullptr ? nullptr : static_cast<const Element*>(step.update) + t * width;
    for (int64_t d = 0; update != nullptr && d < width; d += W) {
      const int64_t lanes = std::min<int64_t>(W, width - d);
      const Float<W> added = load_lanes<W>(update + d, lanes);
      store_lanes<W>(latest + d, step.begins ? added : load_lanes<W>(latest + d, lanes) + added, lanes);
    }
    if (step.queries == nullptr) continue;
    for (int64_t s = 0; s < step.num_sums; ++s) {
      Float<W> squares = {}, products[kMaxSumQueries] = {};
      for (int64_t d = 0; d < width; d += W) {
        const int64_t lanes = std::min<int64_t>(W, width - d);
        const Float<W> value = load_lanes<W>(sums + s * width + d, lanes);
        squares += value * value;
        for (int64_t q = 0; q < num_queries; ++q) {
          products[q] += value * load_lanes<W>(step.queries + q * width + d, lanes);
        }
      }
      factors[s] = 1.0f / std::sqrt(sum_lanes<W>(squares) / static_cast<float>(width) + kSumEpsilon);
      for (int64_t q = 0; q < num_queries; ++q) weights[q][s] = sum_lanes<W>(products[q]);
    }
    for (int64_t q = 0; q < num_queries; ++q) {
      weigh_sums(factors, scale, step.num_sums, weights[q]);
      Element* out = static_cast<Element*>(step.out) + (t * num_queries + q) * width;
      for (int64_t d = 0; d < width; d += W) {
        const int64_t lanes = std::min<int64_t>(W, width - d);
        Float<W> total = {};
        for (int64_t s = 0; s < step.num_sums; ++s) {
          total += load_lanes<W>(sums + s * width + d, lanes) * weights[q][s];
        }
        store_lanes<W>(out + d, total, lanes);
      }
    }
  }
}

MOESERVE_DEFINE_TYPED_VARIANTS(attend_tokens, step.type, (const SumAttention& step, int64_t first, int64_t last),
                               (step, first, last))

}  // namespace

void add_weighted(const RowSum& sum) {
  const auto run = choose_add_rows_of_type(current_isa());
  for_rows(sum.num_rows, 3 * element_bytes(sum.type) * sum.width,
           [&](int64_t first, int64_t last) { run(sum, first, last); });
}

void gelu(const Gelu& step) {
  const auto run = choose_gelu_range_of_type(current_isa());
  const int64_t num_parts = (step.num_elements + kGeluPart - 1) / kGeluPart;
  for_rows(num_parts, 32 * kGeluPart, [&](int64_t first, int64_t last) {
    run(step, first * kGeluPart, std::min(last * kGeluPart, step.num_elements));
  });
}

void limit_lengths(const LengthLimit& step) {
  const auto run = choose_limit_heads_of_type(current_isa());
  for_rows(step.num_tokens * step.num_heads, 2 * element_bytes(step.type) * step.head_size,
           [&](int64_t first, int64_t last) { run(step, first, last); });
}

void attend_sums(const SumAttention& step) {
  const auto run = choose_attend_tokens_of_type(current_isa());
  for_rows(step.num_tokens, element_bytes(step.type) * (step.num_sums + step.num_queries) * step.width,
           [&](int64_t first, int64_t last) { run(step, first, last); });
}

void mix_heads(const HeadMixing& step) {
  const auto run = choose_mix_tokens_of_type(current_isa());
  for_rows(step.num_tokens, 3 * element_bytes(step.type) * (step.num_heads + step.num_key_heads) * step.head_size,
           [&](int64_t first, int64_t last) { run(step, first, last); });
}

}  // namespace moeserve
