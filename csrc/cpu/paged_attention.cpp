// Attention over a paged KV cache.
//
// A row's context is cut at fixed positions into partitions. Each partition is reduced by itself to the largest score,
// the sum of the weights and the weighted values; then a row's partitions are merged in order. So the order of
// additions follows from the row's own position and from the shapes, and a long context can still be shared between
// threads.
//
// A partition is reduced piece by piece, each added to the result of those before. In a piece, up to four query heads
// that share a key-value head go together: first all their scores, then the softmax, then the weighted values, whose
// sums stay in registers. A larger group of heads finds the keys and values of the piece in the cache of the core.
//
// A partition is one piece where few heads share a key-value head, and more where there are many, as their results
// would otherwise be as large as the keys and values themselves.

#include "paged_attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "isa.h"
#include "lanes.h"
#include "parallel.h"

namespace moeserve {

namespace {

constexpr int kPiece = 256;                     // positions
constexpr int kHeadsPerPiece = 16;              // of a group: a partition has a piece for every so many, at least one
constexpr int kMinHeads = 8;                    // a group's heads are divided among items, but not below so many
constexpr int kMaxTile = 16;                    // positions whose scores are computed together, at most
constexpr int kPrefetch = 16;                   // positions that a prefetch runs ahead
constexpr int64_t kParallelBytes = 128 * 1024;  // keys and values that are worth more than one thread
constexpr int64_t kItemsPerThread = 8;          // enough for a thread that is late to be made up for

// One row's position, and the blocks of its chunk.
struct Row {
  int64_t index;  // among the tokens
  int64_t position;
  const int32_t* blocks;
};

// What one thread does at a time: some partitions of one row, for some query heads of one key-value head.
struct Item {
  int32_t row;
  int32_t first_head;
  int32_t num_heads;
  int32_t first_partition;  // counted from the first that the row attends to
  int32_t num_partitions;
  int32_t shared;  // index into `Job::shared`; -1: the item has all of the row's partitions
};

// The partial results of a row and some heads whose partitions are divided among items.
struct Shared {
  float* states;
  std::atomic<int32_t> num_missing;  // whoever brings the last partition merges them all
};

struct Job {
  const PagedAttention& step;
  std::vector<Row> rows;
  std::vector<Item> items;
  std::unique_ptr<Shared[]> shared;
};

int64_t element_bytes(const PagedAttention& step) { return step.type == ElementType::kFloat32 ? 4 : 2; }
int64_t group_size(const PagedAttention& step) { return step.num_heads / step.num_kv_heads; }

int64_t first_position(const PagedAttention& step, const Row& row) {
  return step.window == 0 ? 0 : std::max<int64_t>(0, row.position - step.window + 1);
}

int64_t partition_size(const PagedAttention& step) {
  return kPiece * std::max<int64_t>(1, group_size(step) / kHeadsPerPiece);
}

int64_t count_partitions(const PagedAttention& step, const Row& row) {
  return row.position / partition_size(step) - first_position(step, row) / partition_size(step) + 1;
}

// A state is one partition of one row and query head, reduced: largest score, sum of weights, weighted values.
// The states of a row and some heads are [partitions, heads, state_size].
int64_t state_size(const PagedAttention& step) { return 2 + step.value_size; }

// sums[p][q] += products of 2 * W elements of the key of position p and of query q.
template <int W, int kQueries>
MOESERVE_INLINE void multiply_add(Float<W>* sums, const Pair<W>& key, const float* queries, int64_t stride) {
  MOESERVE_UNROLL
  for (int q = 0; q < kQueries; ++q) {
    sums[q] += key.first * load<W>(queries + q * stride);
    sums[q] += key.second * load<W>(queries + q * stride + W);
  }
}

// Scores of P positions and Q = kQueries queries, P x Q = W: lane p * Q + q belongs to position p and query q.
// `queries` is [Q, stride], every 2 * W elements in their places as a pair and zero from head_size on.
template <int W, int kQueries, typename Element>
MOESERVE_INLINE Float<W> score_tile(const Element* keys, const int64_t* offsets, const float* queries, int64_t stride,
                                    int head_size) {
  constexpr int kPositions = W / kQueries;
  Float<W> sums[W] = {};
  int h = 0;
  for (; h + 2 * W <= head_size; h += 2 * W) {
    MOESERVE_UNROLL
    for (int p = 0; p < kPositions; ++p) {
      const Pair<W> key = load_pair<W>(keys + offsets[p] + h);
      multiply_add<W, kQueries>(sums + p * kQueries, key, queries + h, stride);
    }
  }
  if (h < head_size) {
    MOESERVE_UNROLL
    for (int p = 0; p < kPositions; ++p) {
      const Pair<W> key = load_first<W>(keys + offsets[p] + h, head_size - h);
      multiply_add<W, kQueries>(sums + p * kQueries, key, queries + h, stride);
    }
  }
  return sum_each<W>(sums);
}

// Turns scores into weights e^(score - the query's largest up to this piece), in place. Brings that score and the sum
// of the weights, the first two floats of each query's state, up to date; `factors` become what the weights of the
// pieces before are to be multiplied with.
template <int W, int kQueries>
MOESERVE_INLINE void weigh_scores(float* scores, int num_tiles, bool is_first, float* factors, float* states,
                                  int64_t states_stride) {
  float lanes[W];
  Float<W> largest = load<W>(scores);
  for (int t = 1; t < num_tiles; ++t) largest = larger<W>(largest, load<W>(scores + t * W));
  store<W>(lanes, largest);
  for (int i = kQueries; i < W; ++i) lanes[i % kQueries] = std::max(lanes[i % kQueries], lanes[i]);
  for (int q = 0; q < kQueries; ++q) {
    float* state = states + q * states_stride;
    if (!is_first) {
      lanes[q] = std::max(lanes[q], state[0]);
      factors[q] = std::exp(state[0] - lanes[q]);
    }
    state[0] = lanes[q];
  }
  for (int i = kQueries; i < W; ++i) lanes[i] = lanes[i % kQueries];
  largest = load<W>(lanes);

  Float<W> total = {};
  for (int t = 0; t < num_tiles; ++t) {
    const Float<W> weights = exp_of_nonpositive<W>(load<W>(scores + t * W) - largest);
    store<W>(scores + t * W, weights);
    total += weights;
  }
  store<W>(lanes, total);
  for (int i = kQueries; i < W; ++i) lanes[i % kQueries] += lanes[i];
  for (int q = 0; q < kQueries; ++q) {
    float* weight_sum = states + q * states_stride + 1;
    *weight_sum = is_first ? lanes[q] : *weight_sum * factors[q] + lanes[q];
  }
}

// Sums weight x value over the positions, for kPairs * 2 * W elements of the value, or for its last `num_last` < 2 * W
// elements where that is not 0, and adds them to [kQueries, targets_stride] times `factors`; writes them there where
// this piece is the first. `weights` is [positions, kQueries].
template <int W, int kQueries, int kPairs, typename Element>
MOESERVE_INLINE void weigh_values(const Element* values, const int64_t* offsets, int num_positions,
                                  const float* weights, int num_last, bool is_first, const float* factors,
                                  float* targets, int64_t targets_stride) {
  Float<W> sums[kQueries][2 * kPairs] = {};
  for (int p = 0; p < num_positions; ++p) {
    const Element* row = values + offsets[p];
    MOESERVE_UNROLL
    for (size_t byte = 0; byte < kPairs * 2 * W * sizeof(Element); byte += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(values + offsets[p + kPrefetch]) + byte);
    }
    Pair<W> lanes[kPairs];
    MOESERVE_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      lanes[i] = num_last == 0 ? load_pair<W>(row + i * 2 * W) : load_first<W>(row, num_last);
    }
    MOESERVE_UNROLL
    for (int q = 0; q < kQueries; ++q) {
      const float weight = weights[p * kQueries + q];
      MOESERVE_UNROLL
      for (int i = 0; i < kPairs; ++i) {
        sums[q][2 * i] += weight * lanes[i].first;
        sums[q][2 * i + 1] += weight * lanes[i].second;
      }
    }
  }
  MOESERVE_UNROLL
  for (int q = 0; q < kQueries; ++q) {
    MOESERVE_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      float lanes[2 * W];
      store<W>(lanes, sums[q][2 * i]);
      store<W>(lanes + W, sums[q][2 * i + 1]);
      float* target = targets + q * targets_stride + i * 2 * W;
      const int num_elements = num_last == 0 ? 2 * W : num_last;
      if (is_first) {
        for (int h = 0; h < num_elements; ++h) target[h] = lanes[place<W>(values, h)];
      } else {
        for (int h = 0; h < num_elements; ++h) target[h] = target[h] * factors[q] + lanes[place<W>(values, h)];
      }
    }
  }
}

// Reduces one piece for kQueries query heads into their states, which hold the partition's pieces before it. `keys` and
// `values` are the two caches; `offsets` leads to the rows of num_positions positions, and goes on for
// kMaxTile + kPrefetch more with rows that may be read.
template <int W, int kQueries, typename Element>
MOESERVE_INLINE void reduce_piece(const Element* keys, const Element* values, const int64_t* offsets, int num_positions,
                                  const float* queries, int64_t queries_stride, int head_size, int value_size,
                                  bool is_first, float* states, int64_t states_stride) {
  constexpr int kPositions = W / kQueries;
  constexpr int kPairs = W == 16 || kQueries < 4 ? 2 : 1;  // as many as there are registers for their sums
  static_assert(kPositions <= kMaxTile && kPiece % kPositions == 0);

  float scores[kPiece * kQueries];
  const int num_tiles = (num_positions + kPositions - 1) / kPositions;
  for (int t = 0; t < num_tiles; ++t) {
    const int64_t* tile = offsets + t * kPositions;
    for (int p = 0; p < kPositions; ++p) {
      for (int h = 0; h < head_size; h += 64 / sizeof(Element)) __builtin_prefetch(keys + tile[kPrefetch + p] + h);
    }
    store<W>(scores + t * W, score_tile<W, kQueries>(keys, tile, queries, queries_stride, head_size));
  }
  for (int i = num_positions * kQueries; i < num_tiles * W; ++i) scores[i] = -std::numeric_limits<float>::infinity();
  float factors[kQueries];
  weigh_scores<W, kQueries>(scores, num_tiles, is_first, factors, states, states_stride);

  float* targets = states + 2;
  int h = 0;
  for (; h + kPairs * 2 * W <= value_size; h += kPairs * 2 * W) {
    weigh_values<W, kQueries, kPairs>(values + h, offsets, num_positions, scores, 0, is_first, factors, targets + h,
                                      states_stride);
  }
  for (; h < value_size; h += 2 * W) {
    const int num_last = h + 2 * W <= value_size ? 0 : value_size - h;
    weigh_values<W, kQueries, 1>(values + h, offsets, num_positions, scores, num_last, is_first, factors, targets + h,
                                 states_stride);
  }
}

// Merges the states of the item's row and heads, in the order of their positions, into the rows of `out`. A head's sink
// comes last, with a weight and no value.
template <typename Element>
MOESERVE_INLINE void merge(const PagedAttention& step, const Row& row, const Item& item, float* states,
                           int64_t num_partitions) {
  const int64_t partition_stride = item.num_heads * state_size(step);
  for (int64_t q = 0; q < item.num_heads; ++q) {
    const int64_t head = item.first_head + q;
    float* first = states + q * state_size(step);
    float largest = first[0];
    for (int64_t i = 1; i < num_partitions; ++i) largest = std::max(largest, first[i * partition_stride]);
    if (step.sinks != nullptr) largest = std::max(largest, step.sinks[head]);
    float weight_sum = 0;
    for (int64_t i = 0; i < num_partitions; ++i) {
      float* state = first + i * partition_stride;
      const float factor = std::exp(state[0] - largest);
      weight_sum += state[1] * factor;
      for (int64_t h = 2; h < state_size(step); ++h) {
        first[h] = i == 0 ? state[h] * factor : first[h] + state[h] * factor;
      }
    }
    if (step.sinks != nullptr) weight_sum += std::exp(step.sinks[head] - largest);
    auto* out = static_cast<Element*>(step.out) + (row.index * step.num_heads + head) * step.value_size;
    for (int64_t h = 0; h < step.value_size; ++h) assign(out + h, first[2 + h] / weight_sum);
  }
}

// Room that each thread keeps from call to call.
struct Scratch {
  std::vector<float> queries;
  std::vector<float> states;
  std::vector<float> shared_states;  // of the thread that calls the kernel, for all
};

Scratch& scratch() {
  thread_local Scratch of_this_thread;
  return of_this_thread;
}

float* at_least(std::vector<float>& room, int64_t size) {
  if (static_cast<int64_t>(room.size()) < size) room.resize(size);
  return room.data();
}

// The item's query heads, times scale, as score_tile wants them.
template <int W, typename Element>
MOESERVE_INLINE void scale_queries(const PagedAttention& step, const Row& row, const Item& item, float* queries,
                                   int64_t stride) {
  const int head_size = static_cast<int>(step.head_size);
  const auto* source =
      static_cast<const Element*>(step.query) + (row.index * step.num_heads + item.first_head) * head_size;
  for (int64_t q = 0; q < item.num_heads; ++q, source += head_size, queries += stride) {
    for (int h = 0; h < head_size; h += 2 * W) {
      const Pair<W> pair = h + 2 * W <= head_size ? load_pair<W>(source + h) : load_first<W>(source + h, head_size - h);
      store<W>(queries + h, pair.first * step.scale);
      store<W>(queries + h + W, pair.second * step.scale);
    }
  }
}

// Where the key and value of `num_positions` positions from `first` on lie in the caches, and for what is read or
// prefetched beyond them the last again.
void find_offsets(const PagedAttention& step, const Row& row, int64_t kv_head, int64_t first, int num_positions,
                  int64_t* offsets) {
  int64_t block = first / step.block_size;
  int64_t in_block = first % step.block_size;
  for (int p = 0; p < num_positions; ++block, in_block = 0) {
    const int64_t slot = (row.blocks[block] * step.num_kv_heads + kv_head) * step.block_size;
    for (; p < num_positions && in_block < step.block_size; ++p, ++in_block) {
      offsets[p] = (slot + in_block) * step.head_size;
    }
  }
  std::fill_n(offsets + num_positions, kMaxTile + kPrefetch, offsets[num_positions - 1]);
}

// Reduces the positions from `begin` to before `end`, which lie in one partition, for the item's heads.
template <int W, typename Element>
MOESERVE_INLINE void reduce_partition(const PagedAttention& step, const Row& row, const Item& item, int64_t begin,
                                      int64_t end, const float* queries, int64_t stride, float* states) {
  const auto* keys = static_cast<const Element*>(step.key_cache);
  const auto* values = static_cast<const Element*>(step.value_cache);
  const int head_size = static_cast<int>(step.head_size);
  const int value_size = static_cast<int>(step.value_size);
  for (int64_t piece = begin; piece < end; piece = (piece / kPiece + 1) * kPiece) {
    const bool is_first = piece == begin;
    const int num_positions = static_cast<int>(std::min(end, (piece / kPiece + 1) * kPiece) - piece);
    int64_t offsets[kPiece + kMaxTile + kPrefetch];
    find_offsets(step, row, item.first_head / group_size(step), piece, num_positions, offsets);

    for (int64_t q = 0; q < item.num_heads;) {
      const float* tile = queries + q * stride;
      float* state = states + q * state_size(step);
      const int64_t num_left = item.num_heads - q;
      if (num_left >= 4) {
        reduce_piece<W, 4>(keys, values, offsets, num_positions, tile, stride, head_size, value_size, is_first, state,
                           state_size(step));
        q += 4;
      } else if (num_left >= 2) {
        reduce_piece<W, 2>(keys, values, offsets, num_positions, tile, stride, head_size, value_size, is_first, state,
                           state_size(step));
        q += 2;
      } else {
        reduce_piece<W, 1>(keys, values, offsets, num_positions, tile, stride, head_size, value_size, is_first, state,
                           state_size(step));
        q += 1;
      }
    }
  }
}

template <int W, typename Element>
MOESERVE_INLINE void run_item(const Job& job, const Item& item) {
  const PagedAttention& step = job.step;
  const Row& row = job.rows[item.row];
  const int64_t stride = (step.head_size + 2 * W - 1) / (2 * W) * (2 * W);
  float* queries = at_least(scratch().queries, item.num_heads * stride);
  scale_queries<W, Element>(step, row, item, queries, stride);

  const int64_t partition_stride = item.num_heads * state_size(step);
  float* states = item.shared < 0 ? at_least(scratch().states, item.num_partitions * partition_stride)
                                  : job.shared[item.shared].states + item.first_partition * partition_stride;
  const int64_t first = first_position(step, row);
  const int64_t size = partition_size(step);
  for (int64_t i = 0; i < item.num_partitions; ++i) {
    const int64_t partition = first / size + item.first_partition + i;
    const int64_t begin = std::max(first, partition * size);
    const int64_t end = std::min(row.position + 1, (partition + 1) * size);
    reduce_partition<W, Element>(step, row, item, begin, end, queries, stride, states + i * partition_stride);
  }

  if (item.shared < 0) {
    merge<Element>(step, row, item, states, item.num_partitions);
    return;
  }
  Shared& shared = job.shared[item.shared];
  if (shared.num_missing.fetch_sub(item.num_partitions, std::memory_order_acq_rel) == item.num_partitions) {
    merge<Element>(step, row, item, shared.states, count_partitions(step, row));
  }
}

template <int W>
MOESERVE_INLINE void run_item(const Job& job, const Item& item) {
  switch (job.step.type) {
    case ElementType::kBFloat16:
      return run_item<W, BFloat16>(job, item);
    default:
      return run_item<W, float>(job, item);
  }
}

#if defined(MOESERVE_X86)
MOESERVE_TARGET_AVX512 void run_item_avx512(const Job& job, const Item& item) { run_item<16>(job, item); }
MOESERVE_TARGET_AVX2 void run_item_avx2(const Job& job, const Item& item) { run_item<8>(job, item); }
#endif
void run_item_baseline(const Job& job, const Item& item) { run_item<4>(job, item); }

using RunItem = void (*)(const Job&, const Item&);

RunItem choose_run_item([[maybe_unused]] Isa isa) {
#if defined(MOESERVE_X86)
  if (isa == Isa::kAvx512 || isa == Isa::kAvx512Bf16) return run_item_avx512;
  if (isa == Isa::kAvx2) return run_item_avx2;
#endif
  return run_item_baseline;
}

void refuse(const std::string& what) { throw std::invalid_argument("paged_attention: " + what); }

// The rows of chunks that are ours and have a position, checked against all the sizes.
std::vector<Row> find_rows(const PagedAttention& step) {
  std::vector<Row> rows;
  for (int64_t s = 0; s < step.num_chunks; ++s) {
    const int64_t begin = step.row_starts[s];
    const int64_t end = step.row_starts[s + 1];
    if (begin < 0 || end < begin || end > step.num_tokens) {
      refuse("chunk " + std::to_string(s) + " has rows " + std::to_string(begin) + " to " + std::to_string(end) +
             ", but there are " + std::to_string(step.num_tokens) + " tokens");
    }
    if (end - begin > step.max_rows) continue;

    const int64_t context_len = step.context_lens[s];
    const int32_t* blocks = step.block_table + s * step.max_blocks;
    const int64_t num_blocks = (context_len + step.block_size - 1) / step.block_size;
    if (context_len < 0 || num_blocks > step.max_blocks) {
      refuse("chunk " + std::to_string(s) + " has a context of " + std::to_string(context_len) +
             " positions, but its blocks hold " + std::to_string(step.max_blocks * step.block_size));
    }
    const int64_t first_row = std::max(begin, end - context_len);
    if (first_row == end) continue;
    for (int64_t row = first_row; row < end; ++row) rows.push_back({row, context_len - end + row, blocks});
    const Row first{first_row, context_len - end + first_row, blocks};
    for (int64_t b = first_position(step, first) / step.block_size; b < num_blocks; ++b) {
      if (blocks[b] < 0 || blocks[b] >= step.num_blocks) {
        refuse("chunk " + std::to_string(s) + " has block " + std::to_string(blocks[b]) + ", but there are " +
               std::to_string(step.num_blocks));
      }
    }
  }
  return rows;
}

// Threads that the rows are worth.
int choose_num_threads(const PagedAttention& step, const std::vector<Row>& rows) {
  int64_t num_positions = 0;
  for (const Row& row : rows) num_positions += row.position + 1 - first_position(step, row);
  const int64_t bytes = num_positions * step.num_kv_heads * (step.head_size + step.value_size) * element_bytes(step);
  // A group of many heads is busy with each byte for longer.
  return bytes * std::max<int64_t>(1, group_size(step) / kMinHeads) < kParallelBytes ? 1 : num_threads();
}

// Query heads of an item: a group, or less of a large one where there are too few partitions for the threads. Fours
// stay together, as they are in a whole group.
int64_t choose_num_heads(const PagedAttention& step, int64_t num_partitions, int num_threads) {
  const int64_t group = group_size(step);
  const int64_t wanted = (num_threads * kItemsPerThread + num_partitions - 1) / num_partitions;
  const int64_t parts = std::clamp<int64_t>(group / kMinHeads, 1, wanted);
  return num_threads == 1 ? group : (group + 4 * parts - 1) / (4 * parts) * 4;
}

// Divides the rows' partitions into items: all of a row's in one, unless the row is long compared to the whole step.
void plan(Job& job, int num_threads) {
  const PagedAttention& step = job.step;
  int64_t total = 0;
  for (const Row& row : job.rows) total += count_partitions(step, row) * step.num_kv_heads;
  const int64_t most = num_threads == 1 ? total : std::max<int64_t>(1, total / (num_threads * kItemsPerThread));
  const int64_t group = group_size(step);
  const int64_t num_heads = choose_num_heads(step, std::max<int64_t>(1, total), num_threads);

  std::vector<int64_t> shared_partitions;
  std::vector<int64_t> shared_floats;
  for (size_t r = 0; r < job.rows.size(); ++r) {
    const int64_t partitions = count_partitions(step, job.rows[r]);
    for (int64_t head = 0; head < step.num_heads;) {
      const int64_t heads = std::min(num_heads, group - head % group);
      Item item{static_cast<int32_t>(r), static_cast<int32_t>(head), static_cast<int32_t>(heads), 0, 0, -1};
      if (partitions > most) {
        item.shared = static_cast<int32_t>(shared_partitions.size());
        shared_partitions.push_back(partitions);
        shared_floats.push_back(partitions * heads * state_size(step));
      }
      for (int64_t first = 0; first < partitions; first += most) {
        item.first_partition = static_cast<int32_t>(first);
        item.num_partitions = static_cast<int32_t>(std::min(most, partitions - first));
        job.items.push_back(item);
      }
      head += heads;
    }
  }

  job.shared = std::make_unique<Shared[]>(shared_partitions.size());
  const int64_t num_floats = std::accumulate(shared_floats.begin(), shared_floats.end(), int64_t{0});
  float* states = at_least(scratch().shared_states, num_floats);
  for (size_t i = 0; i < shared_partitions.size(); ++i) {
    job.shared[i].states = states;
    job.shared[i].num_missing.store(static_cast<int32_t>(shared_partitions[i]), std::memory_order_relaxed);
    states += shared_floats[i];
  }
}

}  // namespace

void paged_attention(const PagedAttention& step) {
  Job job{step, find_rows(step), {}, nullptr};
  const int threads = choose_num_threads(step, job.rows);
  plan(job, threads);
  const RunItem run = choose_run_item(current_isa());
  if (threads == 1) {
    for (const Item& item : job.items) run(job, item);
  } else {
    parallel_for(static_cast<int64_t>(job.items.size()), [&](int64_t i) { run(job, job.items[i]); });
  }
}

}  // namespace moeserve
