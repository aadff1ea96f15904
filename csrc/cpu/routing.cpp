// Routing in two passes: first the logits of all tokens, in tiles of tokens and experts whose sums stay in registers,
// and then the choice for each token.  A logit is summed over the width in W lanes, which are added at the end. The
// order of additions depends only on the width, not on the tile.

#include "routing.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "isa.h"
#include "lanes.h"
#include "parallel.h"
#include "rows.h"

namespace moeserve {

namespace {

constexpr int64_t kTokensPerItem = 16;          // their rows stay in the cache while the weights are read
constexpr int64_t kParallelBytes = 128 * 1024;  // bytes of weights that justify a second thread
constexpr int64_t kItemsPerThread = 4;
constexpr int kMaxExperts = 8;           // read together; more rows a power of two apart would evict each other
constexpr int64_t kExpertsPerPart = 16;  // items divide the experts at multiples of this

// The unit of work of a thread: logits [first_token, last_token) x [first_expert, last_expert).
struct Tile {
  int64_t first_token;
  int64_t last_token;
  int64_t first_expert;
  int64_t last_expert;
};

// Buffers that each thread keeps from call to call.
struct Scratch {
  std::vector<float> rows;
  std::vector<float> logits;  // of the calling thread, used by all threads
};

Scratch& scratch() {
  thread_local Scratch of_this_thread;
  return of_this_thread;
}

float* at_least(std::vector<float>& buffers, int64_t size) {
  if (static_cast<int64_t>(buffers.size()) < size) buffers.resize(size);
  return buffers.data();
}

// sums[r * stride + e] += products of row r and expert e. Rows are padded with zeros to a multiple of W.
template <int W, int kRows, int kExperts>
MOESERVE_INLINE void multiply_add(const float* const* row, const float* const* expert, int64_t width, Float<W>* totals,
                                  int stride) {
  Float<W> sums[kRows * kExperts] = {};
  int64_t d = 0;
  for (; d + W <= width; d += W) {
    Float<W> lanes[kRows];
    MOESERVE_UNROLL
    for (int r = 0; r < kRows; ++r) lanes[r] = load<W>(row[r] + d);
    MOESERVE_UNROLL
    for (int e = 0; e < kExperts; ++e) {
      const Float<W> weights = load<W>(expert[e] + d);
      MOESERVE_UNROLL
      for (int r = 0; r < kRows; ++r) sums[r * kExperts + e] += lanes[r] * weights;
    }
  }
  if (d < width) {
    MOESERVE_UNROLL
    for (int e = 0; e < kExperts; ++e) {
      float last[W] = {};
      std::memcpy(last, expert[e] + d, (width - d) * sizeof(float));
      MOESERVE_UNROLL
      for (int r = 0; r < kRows; ++r) sums[r * kExperts + e] += load<W>(row[r] + d) * load<W>(last);
    }
  }
  MOESERVE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    MOESERVE_UNROLL
    for (int e = 0; e < kExperts; ++e) totals[r * stride + e] = sums[r * kExperts + e];
  }
}

// Compute the logits of kRows tokens and W / kRows experts. If there are fewer, the last token and expert are repeated,
// and the additional results are dropped.
template <int W, int kRows>
MOESERVE_INLINE void logits_of_tile(const float* rows, int64_t row_stride, int64_t num_rows, const float* weight,
                                    int64_t num_experts, int64_t width, float* logits, int64_t logits_stride) {
  constexpr int kExperts = W / kRows;
  constexpr int kAtOnce = kExperts > kMaxExperts ? kMaxExperts : kExperts;
  const float* row[kRows];
  const float* expert[kExperts];
  for (int r = 0; r < kRows; ++r) row[r] = rows + std::min<int64_t>(r, num_rows - 1) * row_stride;
  for (int e = 0; e < kExperts; ++e) expert[e] = weight + std::min<int64_t>(e, num_experts - 1) * width;

  Float<W> sums[W];
  MOESERVE_UNROLL
  for (int e = 0; e < kExperts; e += kAtOnce) {
    multiply_add<W, kRows, kAtOnce>(row, expert + e, width, sums + e, kExperts);
  }
  float totals[W];
  store<W>(totals, sum_each<W>(sums));
  for (int64_t r = 0; r < std::min<int64_t>(kRows, num_rows); ++r) {
    for (int64_t e = 0; e < std::min<int64_t>(kExperts, num_experts); ++e) {
      logits[r * logits_stride + e] = totals[r * kExperts + e];
    }
  }
}

// Widen the hidden states of some tokens to floats, with distance `stride` and padded with zeros.
template <int W, typename Element>
MOESERVE_INLINE void widen_rows(const Routing& routing, int64_t first_token, int64_t last_token, float* rows,
                                int64_t stride) {
  for (int64_t t = first_token; t < last_token; ++t, rows += stride) {
    const auto* source = static_cast<const Element*>(routing.hidden) + t * routing.hidden_stride;
    std::fill(rows + routing.width, rows + stride, 0.0f);
    int64_t d = 0;
    for (; d + W <= routing.width; d += W) store<W>(rows + d, load_in_order<W>(source + d));
    for (; d < routing.width; ++d) rows[d] = widen(source[d]);
  }
}

template <int W, int kRows>
MOESERVE_INLINE void compute_logits(const Routing& routing, const Tile& tile, const float* rows, int64_t stride,
                                    float* logits) {
  constexpr int64_t kExperts = W / kRows;
  for (int64_t e = tile.first_expert; e < tile.last_expert; e += kExperts) {
    for (int64_t t = tile.first_token; t < tile.last_token; t += kRows) {
      logits_of_tile<W, kRows>(rows + (t - tile.first_token) * stride, stride, tile.last_token - t,
                               routing.weight + e * routing.width, tile.last_expert - e, routing.width,
                               logits + t * routing.num_experts + e, routing.num_experts);
    }
  }
}

template <int W>
MOESERVE_INLINE void compute_logits(const Routing& routing, const Tile& tile, float* logits) {
  const int64_t num_tokens = tile.last_token - tile.first_token;
  const int64_t stride = (routing.width + 2 * W - 1) / (2 * W) * (2 * W);
  float* rows = at_least(scratch().rows, num_tokens * stride);
  if (routing.type == ElementType::kBFloat16) {
    widen_rows<W, BFloat16>(routing, tile.first_token, tile.last_token, rows, stride);
  } else {
    widen_rows<W, float>(routing, tile.first_token, tile.last_token, rows, stride);
  }
  constexpr int kManyRows = W == 16 ? 4 : 2;  // arranges W sums in a nearly square tile
  if (num_tokens == 1) {
    compute_logits<W, 1>(routing, tile, rows, stride, logits);
  } else {
    compute_logits<W, kManyRows>(routing, tile, rows, stride, logits);
  }
}

// Replace each x <= 0 with e^x. The memory is padded to a multiple of W.
template <int W>
MOESERVE_INLINE void exp_each(float* x, int64_t count) {
  for (int64_t i = 0; i < count; i += W) {
    const Float<W> lanes = load<W>(x + i);
    store<W>(x + i, exp_of_nonpositive<W>(lanes));
    for (int j = 0; j < W; ++j) {
      if (lanes[j] < -87.0f) x[i + j] = std::exp(lanes[j]);  // so that tiny results keep their order
    }
  }
}

int64_t padded(int64_t count) { return (count + 15) / 16 * 16; }  // a multiple of every W

// Softmax in place.
template <int W>
MOESERVE_INLINE void softmax(float* numbers, int64_t count, std::vector<float>& buffers) {
  float* x = at_least(buffers, padded(count));
  float largest = numbers[0];
  for (int64_t i = 1; i < count; ++i) largest = numbers[i] > largest ? numbers[i] : largest;
  for (int64_t i = 0; i < count; ++i) x[i] = numbers[i] - largest;
  std::fill(x + count, x + padded(count), 0.0f);
  exp_each<W>(x, count);
  std::fill(x + count, x + padded(count), 0.0f);
  Float<W> sums = {};
  for (int64_t i = 0; i < count; i += W) sums += load<W>(x + i);
  const float total = sum_lanes<W>(sums);
  for (int64_t i = 0; i < count; ++i) numbers[i] = x[i] / total;
}

// Sigmoid in place, computed from powers that are at most 1.
template <int W>
MOESERVE_INLINE void sigmoid(float* numbers, int64_t count, std::vector<float>& buffers) {
  float* x = at_least(buffers, padded(count));
  for (int64_t i = 0; i < count; ++i) x[i] = numbers[i] > 0.0f ? -numbers[i] : numbers[i];
  std::fill(x + count, x + padded(count), 0.0f);
  exp_each<W>(x, count);
  for (int64_t i = 0; i < count; ++i) numbers[i] = (numbers[i] > 0.0f ? 1.0f : x[i]) / (1.0f + x[i]);
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Return an integer that compares like the number, with NaN above all numbers. -0 cannot occur in sums that start at 0.
MOESERVE_INLINE int32_t order_key(float number) {
  int32_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  bits = bits >= 0 ? bits : bits ^ 0x7FFFFFFF;
  return number == number ? bits : std::numeric_limits<int32_t>::max();
}

MOESERVE_INLINE float number_of_key(int32_t key) {
  key = key >= 0 ? key : key ^ 0x7FFFFFFF;
  float number;
  std::memcpy(&number, &key, sizeof(number));
  return number;
}

// Combine a key with its index, so that among equal keys the lowest index gives the largest result.
MOESERVE_INLINE int64_t with_index(int32_t key, int64_t index) {
  return static_cast<int64_t>(key) * (int64_t{1} << 32) + (0xFFFFFFFF - index);
}

template <int W>
struct Wide {
  typedef int64_t Long __attribute__((vector_size(W / 2 * sizeof(int64_t))));  // as many bytes as W floats
};

constexpr int64_t kNoKey = std::numeric_limits<int64_t>::min();  // below any key

// Write the indices of the `num_best` largest keys, largest first. `keys` is padded to a multiple of 16, and is
// overwritten.
template <int W>
MOESERVE_INLINE void take_best(int64_t* keys, int64_t count, int64_t num_best, int64_t* best) {
  using Long = typename Wide<W>::Long;
  constexpr int kLanes = W / 2;
  std::fill(keys + count, keys + padded(count), kNoKey);
  for (int64_t k = 0; k < num_best; ++k) {
    Long largest;
    std::memcpy(&largest, keys, sizeof(largest));
    for (int64_t i = kLanes; i < count; i += kLanes) {
      Long lanes;
      std::memcpy(&lanes, keys + i, sizeof(lanes));
      largest = lanes > largest ? lanes : largest;
    }
    int64_t key = largest[0];
    MOESERVE_UNROLL
    for (int i = 1; i < kLanes; ++i) key = largest[i] > key ? largest[i] : key;
    best[k] = 0xFFFFFFFF - (key & 0xFFFFFFFF);
    keys[best[k]] = kNoKey;
  }
}

// Buffers for the choice of one token, for E experts in G groups.
struct ChoiceBuffers {
  std::vector<float> powers;
  std::vector<float> corrected;          // [E]
  std::vector<int64_t> keys;             // [E], padded to a multiple of 16
  std::vector<int64_t> group_keys;       // [G], padded to a multiple of 16
  std::vector<int64_t> best_groups;      // [G]
  std::vector<uint8_t> is_chosen_group;  // [G]
};

ChoiceBuffers& choice_buffers(const Routing& routing) {
  thread_local ChoiceBuffers buffers;
  buffers.corrected.resize(routing.num_experts);
  buffers.keys.resize(padded(routing.num_experts));
  buffers.group_keys.resize(padded(routing.num_groups));
  buffers.best_groups.resize(routing.num_groups);
  buffers.is_chosen_group.resize(routing.num_groups);
  return buffers;
}

// Return the score of a group's best expert, or the sum of the scores of its best two.
MOESERVE_INLINE float rating(const float* ranks, int64_t group_size, int64_t experts_rating_group) {
  int32_t best = std::numeric_limits<int32_t>::min(), second = best;
  for (int64_t i = 0; i < group_size; ++i) {
    const int32_t key = order_key(ranks[i]);
    const int32_t lesser = key < best ? key : best;
    second = lesser > second ? lesser : second;
    best = key > best ? key : best;
  }
  return experts_rating_group == 1 ? number_of_key(best) : number_of_key(best) + number_of_key(second);
}

// Rank the experts of groups that were not chosen below all numbers.
template <int W>
MOESERVE_INLINE void exclude_other_groups(const Routing& routing, const float* ranks, ChoiceBuffers& buffers) {
  const int64_t group_size = routing.num_experts / routing.num_groups;
  for (int64_t group = 0; group < routing.num_groups; ++group) {
    const float rated = rating(ranks + group * group_size, group_size, routing.experts_rating_group);
    buffers.group_keys[group] = with_index(order_key(rated), group);
  }
  take_best<W>(buffers.group_keys.data(), routing.num_groups, routing.num_chosen_groups, buffers.best_groups.data());
  std::fill(buffers.is_chosen_group.begin(), buffers.is_chosen_group.end(), 0);
  for (int64_t i = 0; i < routing.num_chosen_groups; ++i) buffers.is_chosen_group[buffers.best_groups[i]] = 1;
  for (int64_t group = 0; group < routing.num_groups; ++group) {
    if (buffers.is_chosen_group[group]) continue;
    for (int64_t e = group * group_size; e < (group + 1) * group_size; ++e) {
      buffers.keys[e] = with_index(std::numeric_limits<int32_t>::min(), e);
    }
  }
}

// Write the softmax of each chosen expert among the experts near it that were not chosen before it.
inline void softmaxes_in_turn(const Routing& routing, const float* logits, const int64_t* experts, float* weights) {
  for (int64_t k = 0; k < routing.top_k; ++k) {
    const float largest = logits[experts[k]];
    float total = 0.0f;
    for (int64_t e = 0; e < routing.num_experts; ++e) {
      if (std::find(experts, experts + k, e) != experts + k) continue;
      const float size = std::max(std::abs(logits[e]), largest);
      const bool is_far = (largest - logits[e]) / size > routing.tolerance;
      if (!is_far) total += std::exp(logits[e] - largest);
    }
    weights[k] = 1.0f / total;
  }
}

template <int W>
MOESERVE_INLINE void choose_experts(const Routing& routing, float* scores, int64_t token, ChoiceBuffers& buffers) {
  const int64_t num_experts = routing.num_experts, top_k = routing.top_k;
  if (routing.bias != nullptr) {
    for (int64_t e = 0; e < num_experts; ++e) scores[e] += routing.bias[e];
  }
  if (routing.scoring == Scoring::kSoftmax) softmax<W>(scores, num_experts, buffers.powers);
  if (routing.scoring == Scoring::kSigmoid) sigmoid<W>(scores, num_experts, buffers.powers);

  if (routing.scoring == Scoring::kSqrtSoftplus) {
    for (int64_t e = 0; e < num_experts; ++e) scores[e] = std::sqrt(softplus(scores[e]));
  }

  const float* ranks = scores;
  if (routing.correction != nullptr) {
    float* corrected = buffers.corrected.data();
    for (int64_t e = 0; e < num_experts; ++e) corrected[e] = scores[e] + routing.correction[e];
    ranks = corrected;
  }
  int64_t* experts = routing.experts + token * top_k;
  if (routing.given != nullptr) {
    std::copy_n(routing.given + token * top_k, top_k, experts);
  } else {
    for (int64_t e = 0; e < num_experts; ++e) buffers.keys[e] = with_index(order_key(ranks[e]), e);
    if (routing.num_groups > 1) exclude_other_groups<W>(routing, ranks, buffers);
    take_best<W>(buffers.keys.data(), num_experts, top_k, experts);
  }

  float* weights = routing.weights + token * top_k;
  for (int64_t k = 0; k < top_k; ++k) weights[k] = scores[experts[k]];
  if (routing.scoring == Scoring::kSoftmaxOfChosen) softmax<W>(weights, top_k, buffers.powers);
  if (routing.scoring == Scoring::kSigmoidOfChosen) sigmoid<W>(weights, top_k, buffers.powers);
  if (routing.scoring == Scoring::kSparseMixer) softmaxes_in_turn(routing, scores, experts, weights);
  if (routing.is_normalized) {
    constexpr float kTiny = 1e-20f;  // avoids a division by zero
    float total = 0.0f;
    for (int64_t k = 0; k < top_k; ++k) total += weights[k];
    total += kTiny;
    for (int64_t k = 0; k < top_k; ++k) weights[k] /= total;
  }
  for (int64_t k = 0; k < top_k; ++k) weights[k] *= routing.scale;
  if (routing.factors != nullptr) {
    for (int64_t k = 0; k < top_k; ++k) weights[k] *= routing.factors[experts[k]];
  }
}

template <int W>
MOESERVE_INLINE void choose_experts(const Routing& routing, float* logits, int64_t first_token, int64_t last_token) {
  ChoiceBuffers& buffers = choice_buffers(routing);
  for (int64_t t = first_token; t < last_token; ++t) {
    choose_experts<W>(routing, logits + t * routing.num_experts, t, buffers);
  }
}

MOESERVE_DEFINE_VARIANTS(compute_logits, (const Routing& routing, const Tile& tile, float* logits),
                         (routing, tile, logits))
MOESERVE_DEFINE_VARIANTS(choose_experts, (const Routing& routing, float* logits, int64_t first, int64_t last),
                         (routing, logits, first, last))

// Return the number of experts per item: all experts, or fewer if there are too few tokens for the threads.
int64_t choose_num_experts(const Routing& routing, int64_t num_blocks, int num_threads) {
  const int64_t wanted = (num_threads * kItemsPerThread + num_blocks - 1) / num_blocks;
  const int64_t num_units = (routing.num_experts + kExpertsPerPart - 1) / kExpertsPerPart;
  const int64_t parts = std::min(wanted, num_units);
  return (num_units + parts - 1) / parts * kExpertsPerPart;
}

}  // namespace

void route(const Routing& routing) {
  if (routing.num_tokens == 0) return;
  for (int64_t i = 0; routing.given != nullptr && i < routing.num_tokens * routing.top_k; ++i) {
    if (routing.given[i] < 0 || routing.given[i] >= routing.num_experts) {
      throw std::invalid_argument("route: a token is given expert " + std::to_string(routing.given[i]) + " of " +
                                  std::to_string(routing.num_experts));
    }
  }
  const auto compute = choose_compute_logits(current_isa());
  const auto choose = choose_choose_experts(current_isa());
  float* logits = at_least(scratch().logits, routing.num_tokens * routing.num_experts);

  const int64_t weight_bytes = routing.num_experts * routing.width * static_cast<int64_t>(sizeof(float));
  const int64_t num_blocks = (routing.num_tokens + kTokensPerItem - 1) / kTokensPerItem;
  const bool is_small = weight_bytes * std::min(routing.num_tokens, kTokensPerItem) < kParallelBytes;
  const int threads = is_small && num_blocks == 1 ? 1 : num_threads();
  const int64_t experts_per_item =
      threads == 1 ? routing.num_experts : choose_num_experts(routing, num_blocks, threads);
  const int64_t num_parts = (routing.num_experts + experts_per_item - 1) / experts_per_item;
  const auto run = [&](int64_t item) {
    const int64_t block = item / num_parts, part = item % num_parts;
    compute(routing,
            Tile{block * kTokensPerItem, std::min(routing.num_tokens, (block + 1) * kTokensPerItem),
                 part * experts_per_item, std::min(routing.num_experts, (part + 1) * experts_per_item)},
            logits);
  };
  if (threads == 1) {
    for (int64_t item = 0; item < num_blocks * num_parts; ++item) run(item);
  } else {
    parallel_for(num_blocks * num_parts, run);
  }
  constexpr int64_t kWorkPerExpert = 64;  // the choice takes about as long per expert as moving this many bytes
  for_rows(routing.num_tokens, routing.num_experts * kWorkPerExpert,
           [&](int64_t first, int64_t last) { choose(routing, logits, first, last); });
}

}  // namespace moeserve
