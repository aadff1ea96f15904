// A counting sort, copies of rows, and sums of rows. Each token's sum stays in registers, some columns at a time.
//
// This file is compiled with -ffp-contract=off: with each product rounded before it is added, a sum has the bytes that
// torch gives it, with every instruction set.

#include "pairs.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "isa.h"
#include "lanes.h"
#include "rows.h"

namespace moeserve {

namespace {

void refuse(const std::string& message) { throw std::invalid_argument(message); }

// Sums kPairs * 2 * W columns from `first` on, or, where that part is not whole, the last `num_columns` < 2 * W.
template <int W, int kPairs, bool kIsWhole, typename Element>
MOESERVE_INLINE void sum_columns(const WeightedSum& sum, const int64_t* rows_of_token, int64_t token, int64_t first,
                                 int64_t num_columns) {
  const auto* rows = static_cast<const Element*>(sum.rows) + first;
  const float* weights = sum.weights + token * sum.top_k;
  Pair<W> totals[kPairs] = {};
  for (int64_t k = 0; k < sum.top_k; ++k) {
    const Element* row = rows + rows_of_token[k] * sum.width;
    MOESERVE_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      Pair<W> product{};
      if (rows_of_token[k] >= 0) {
        const Pair<W> pair = load_part<W, kIsWhole>(row + i * 2 * W, num_columns);
        product = {pair.first * weights[k], pair.second * weights[k]};
      }
      totals[i] = k == 0 ? product : Pair<W>{totals[i].first + product.first, totals[i].second + product.second};
    }
  }
  Element* out = static_cast<Element*>(sum.out) + token * sum.width + first;
  MOESERVE_UNROLL
  for (int i = 0; i < kPairs; ++i) {
    store_part<W, kIsWhole>(out + i * 2 * W, round_to<W>(out, totals[i]), num_columns);
  }
}

template <int W, typename Element>
MOESERVE_INLINE void sum_tokens(const WeightedSum& sum, const int64_t* row_of_pair, int64_t first, int64_t last) {
  constexpr int kPairs = 4;
  for (int64_t t = first; t < last; ++t) {
    const int64_t* rows_of_token = row_of_pair + t * sum.top_k;
    int64_t d = 0;
    for (; d + kPairs * 2 * W <= sum.width; d += kPairs * 2 * W) {
      sum_columns<W, kPairs, true, Element>(sum, rows_of_token, t, d, 2 * W);
    }
    for (; d + 2 * W <= sum.width; d += 2 * W) sum_columns<W, 1, true, Element>(sum, rows_of_token, t, d, 2 * W);
    if (d < sum.width) sum_columns<W, 1, false, Element>(sum, rows_of_token, t, d, sum.width - d);
  }
}

template <int W>
MOESERVE_INLINE void sum_tokens(const WeightedSum& sum, const int64_t* row_of_pair, int64_t first, int64_t last) {
  if (sum.type == ElementType::kBFloat16) {
    sum_tokens<W, BFloat16>(sum, row_of_pair, first, last);
  } else {
    sum_tokens<W, float>(sum, row_of_pair, first, last);
  }
}

#if defined(MOESERVE_X86)
MOESERVE_TARGET_AVX512 void sum_tokens_avx512(const WeightedSum& sum, const int64_t* row_of_pair, int64_t first,
                                              int64_t last) {
  sum_tokens<16>(sum, row_of_pair, first, last);
}
MOESERVE_TARGET_AVX2 void sum_tokens_avx2(const WeightedSum& sum, const int64_t* row_of_pair, int64_t first,
                                          int64_t last) {
  sum_tokens<8>(sum, row_of_pair, first, last);
}
#endif
void sum_tokens_baseline(const WeightedSum& sum, const int64_t* row_of_pair, int64_t first, int64_t last) {
  sum_tokens<4>(sum, row_of_pair, first, last);
}

using SumTokens = void (*)(const WeightedSum&, const int64_t* row_of_pair, int64_t first, int64_t last);

SumTokens choose_sum_tokens([[maybe_unused]] Isa isa) {
#if defined(MOESERVE_X86)
  if (isa == Isa::kAvx512) return sum_tokens_avx512;
  if (isa == Isa::kAvx2) return sum_tokens_avx2;
#endif
  return sum_tokens_baseline;
}

}  // namespace

int64_t sort_pairs(const PairSort& sort) {
  std::fill_n(sort.counts, sort.num_keys, 0);
  for (int64_t p = 0; p < sort.num_pairs; ++p) {
    const int64_t key = sort.keys[p];
    if (key < -1 || key >= sort.num_keys) {
      refuse("pair " + std::to_string(p) + " has key " + std::to_string(key) + ", but there are " +
             std::to_string(sort.num_keys));
    }
    if (key >= 0) ++sort.counts[key];
  }
  thread_local std::vector<int64_t> next;  // place of each key's next pair
  next.resize(sort.num_keys);
  int64_t num_kept = 0;
  for (int64_t key = 0; key < sort.num_keys; ++key) {
    next[key] = num_kept;
    num_kept += sort.counts[key];
  }
  for (int64_t p = 0; p < sort.num_pairs; ++p) {
    if (sort.keys[p] >= 0) sort.order[next[sort.keys[p]]++] = p;
  }
  return num_kept;
}

void gather_rows(const RowGather& gather) {
  for (int64_t r = 0; r < gather.num_rows; ++r) {
    if (gather.indices[r] < 0 || gather.indices[r] >= gather.num_source_rows * gather.divisor) {
      refuse("row " + std::to_string(r) + " comes from " + std::to_string(gather.indices[r]) + ", but there are " +
             std::to_string(gather.num_source_rows * gather.divisor));
    }
  }
  const int64_t row_bytes = gather.width * gather.element_bytes;
  const int64_t stride = gather.source_stride * gather.element_bytes;
  for_rows(gather.num_rows, 2 * row_bytes, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      const int64_t row = gather.indices[r] / gather.divisor;
      std::memcpy(static_cast<char*>(gather.out) + r * row_bytes,
                  static_cast<const char*>(gather.source) + row * stride, row_bytes);
    }
  });
}

void weighted_sum(const WeightedSum& sum) {
  thread_local std::vector<int64_t> room;
  room.assign(sum.num_tokens * sum.top_k, -1);
  int64_t* row_of_pair = room.data();
  for (int64_t r = 0; r < sum.num_rows; ++r) {
    const int64_t pair = sum.pair_of_row[r];
    if (pair < 0 || pair >= sum.num_tokens * sum.top_k) {
      refuse("row " + std::to_string(r) + " belongs to pair " + std::to_string(pair) + ", but there are " +
             std::to_string(sum.num_tokens * sum.top_k));
    }
    row_of_pair[pair] = r;
  }
  const SumTokens run = choose_sum_tokens(current_isa());
  const int64_t element_bytes = sum.type == ElementType::kBFloat16 ? 2 : 4;
  for_rows(sum.num_tokens, (sum.top_k + 1) * sum.width * element_bytes,
           [&](int64_t first, int64_t last) { run(sum, row_of_pair, first, last); });
}

}  // namespace moeserve
