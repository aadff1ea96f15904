// Counting sort, copies and weighted sums of rows. The sums of a token stay in registers, for some columns at a time.
//
// This file is compiled with -ffp-contract=off: each product is rounded before it is added, so that sums have the same
// bytes as in torch with every instruction set.

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

// Sum kPairs * 2 * W columns from `first` on, or, if kIsWhole is false, the last `num_columns` < 2 * W columns.
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

MOESERVE_DEFINE_TYPED_VARIANTS(sum_tokens, sum.type,
                               (const WeightedSum& sum, const int64_t* row_of_pair, int64_t first, int64_t last),
                               (sum, row_of_pair, first, last))

template <typename Key>
void check_keys(const PairSort& sort) {
  const auto* keys = static_cast<const Key*>(sort.keys);
  for (int64_t t = 0; t < sort.num_tokens; ++t, keys += sort.token_stride) {
    for (int64_t k = 0; k < sort.keys_per_token; ++k) {
      if (keys[k] < -1 || keys[k] >= sort.num_known) {
        refuse("pair " + std::to_string(t * sort.keys_per_token + k) + " has key " + std::to_string(keys[k]) +
               ", but there are " + std::to_string(sort.num_known));
      }
    }
  }
}

template <typename Key>
int64_t sort_keys(const PairSort& sort) {
  const auto num_keys = static_cast<uint64_t>(sort.num_keys);
  // Call use(pair, key) for each pair with a counted key.
  const auto for_pairs = [&](const auto& use) {
    const auto* keys = static_cast<const Key*>(sort.keys);
    for (int64_t t = 0, pair = 0; t < sort.num_tokens; ++t, keys += sort.token_stride) {
      for (int64_t k = 0; k < sort.keys_per_token; ++k, ++pair) {
        const auto key = static_cast<uint64_t>(keys[k] - sort.first_key);
        if (key < num_keys) use(pair, key);
      }
    }
  };
  check_keys<Key>(sort);
  std::fill_n(sort.counts, sort.num_keys, 0);
  for_pairs([&](int64_t, uint64_t key) { ++sort.counts[key]; });
  thread_local std::vector<int64_t> next;  // next index in `order` for each key
  next.resize(sort.num_keys);
  int64_t num_kept = 0;
  for (int64_t key = 0; key < sort.num_keys; ++key) {
    next[key] = num_kept;
    num_kept += sort.counts[key];
  }
  for_pairs([&](int64_t pair, uint64_t key) { sort.order[next[key]++] = pair; });
  std::fill(sort.order + num_kept, sort.order + sort.num_tokens * sort.keys_per_token, -1);
  return num_kept;
}

}  // namespace

int64_t sort_pairs(const PairSort& sort) {
  return sort.type == ElementType::kInt32 ? sort_keys<int32_t>(sort) : sort_keys<int64_t>(sort);
}

void add_counts(const CountAddition& addition) {
  for (int64_t key = 0; key < addition.num_keys; ++key) addition.totals[key] += addition.counts[key];
}

void choose_copies(const CopyChoice& choice) {
  for (int64_t token = 0; token < choice.num_tokens; ++token) {
    for (int64_t pair = token * choice.top_k; pair < (token + 1) * choice.top_k; ++pair) {
      const int64_t expert = choice.experts[pair];
      if (expert == -1) {
        choice.chosen[pair] = -1;
        continue;
      }
      const int64_t num_copies = expert >= 0 && expert < choice.num_experts ? choice.num_copies[expert] : 0;
      if (num_copies < 1 || num_copies > choice.max_copies) {
        throw std::invalid_argument("expert " + std::to_string(expert) + " has no copies among those of " +
                                    std::to_string(choice.num_experts) + " experts");
      }
      choice.chosen[pair] = choice.copies[expert * choice.max_copies + (choice.first_token + token) % num_copies];
    }
  }
}

void gather_rows(const RowGather& gather) {
  for (int64_t r = 0; r < gather.num_rows; ++r) {
    if (gather.indices[r] < -1 || gather.indices[r] >= gather.num_source_rows * gather.divisor) {
      refuse("row " + std::to_string(r) + " comes from " + std::to_string(gather.indices[r]) + ", but there are " +
             std::to_string(gather.num_source_rows * gather.divisor));
    }
  }
  const int64_t row_bytes = gather.width * gather.element_bytes;
  const int64_t stride = gather.source_stride * gather.element_bytes;
  for_rows(gather.num_rows, 2 * row_bytes, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      if (gather.indices[r] < 0) continue;
      const int64_t row = gather.indices[r] / gather.divisor;
      std::memcpy(static_cast<char*>(gather.out) + r * row_bytes,
                  static_cast<const char*>(gather.source) + row * stride, row_bytes);
    }
  });
}

void scatter_rows(const RowScatter& scatter) {
  thread_local std::vector<int64_t> buffer;
  buffer.assign(scatter.num_out_rows, -1);
  int64_t* source_of_row = buffer.data();
  for (int64_t r = 0; r < scatter.num_rows; ++r) {
    const int64_t index = scatter.indices[r];
    if (index < -1 || index >= scatter.num_out_rows) {
      refuse("row " + std::to_string(r) + " goes to " + std::to_string(index) + ", but there are " +
             std::to_string(scatter.num_out_rows));
    }
    if (index >= 0) source_of_row[index] = r;
  }
  for_rows(scatter.num_out_rows, 2 * scatter.row_bytes, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      char* target = static_cast<char*>(scatter.out) + row * scatter.row_bytes;
      if (source_of_row[row] < 0) {
        std::memset(target, 0, scatter.row_bytes);
      } else {
        const char* source = static_cast<const char*>(scatter.source) + source_of_row[row] * scatter.row_bytes;
        std::memcpy(target, source, scatter.row_bytes);
      }
    }
  });
}

void join_rows(const RowJoin& join) {
  const int64_t row_bytes = join.first_bytes + join.second_bytes;
  for_rows(join.num_rows, 2 * row_bytes, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      char* target = static_cast<char*>(join.out) + row * row_bytes;
      std::memcpy(target, static_cast<const char*>(join.first) + row * join.first_stride, join.first_bytes);
      std::memcpy(target + join.first_bytes, static_cast<const char*>(join.second) + row * join.second_stride,
                  join.second_bytes);
    }
  });
}

void weighted_sum(const WeightedSum& sum) {
  thread_local std::vector<int64_t> buffer;
  buffer.assign(sum.num_tokens * sum.top_k, -1);
  int64_t* row_of_pair = buffer.data();
  for (int64_t r = 0; r < sum.num_rows; ++r) {
    const int64_t pair = sum.pair_of_row[r];
    if (pair == -1) continue;
    if (pair < 0 || pair >= sum.num_tokens * sum.top_k) {
      refuse("row " + std::to_string(r) + " belongs to pair " + std::to_string(pair) + ", but there are " +
             std::to_string(sum.num_tokens * sum.top_k));
    }
    row_of_pair[pair] = r;
  }
  const auto run = choose_sum_tokens_of_type(current_isa());
  for_rows(sum.num_tokens, (sum.top_k + 1) * sum.width * element_bytes(sum.type),
           [&](int64_t first, int64_t last) { run(sum, row_of_pair, first, last); });
}

}  // namespace moeserve
