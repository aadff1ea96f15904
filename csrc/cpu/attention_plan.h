// Division of a step of attention into items that threads process independently.
//
// An item covers some rows of a chunk, some query heads of one key-value head, and some partitions of positions. The
// choice of items does not change any bit of the results.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <vector>

#include "attention_block.h"
#include "paged_attention.h"

namespace moeserve {

constexpr int kPartition = 256;         // positions per kHeadsPerPartition heads of a whole group
constexpr int kHeadsPerPartition = 16;  // keeps the states of a group smaller than its keys and values
static_assert(kPartition % kBlock == 0);

// Consecutive rows of one request, the first of them at `position`, and the blocks of their context.
struct Chunk {
  int64_t first_row;  // index among the tokens
  int64_t num_rows;
  int64_t position;
  const int32_t* blocks;
};

struct Item {
  int32_t chunk;
  int32_t first_row;  // index within the chunk
  int32_t num_rows;
  int32_t first_head;
  int32_t num_heads;
  int32_t first_partition;
  int32_t num_partitions;
  int32_t shared;  // index into `AttentionPlan::shared`; -1: the item covers all partitions of its rows
};

// Rows and heads whose partitions are distributed over several items.
struct Shared {
  int64_t first_float;  // index of its states in the memory for shared states
  int32_t first_partition;
  int32_t num_partitions;
  std::atomic<int32_t> num_missing;  // partitions not complete yet; the item that completes the last one merges all

  Shared(int64_t first_float, int32_t first, int32_t count)
      : first_float(first_float), first_partition(first), num_partitions(count), num_missing(count) {}
};

// The items of a step. The memory is kept from step to step.
struct AttentionPlan {
  std::vector<Chunk> chunks;
  std::vector<Item> items;
  std::deque<Shared> shared;
  int64_t num_shared_floats;  // size of the states of all shared partitions
  int num_threads;            // number of threads that the step's work justifies
};

inline int64_t group_size(const PagedAttention& step) { return step.num_heads / step.num_kv_heads; }

// Return the bytes of an element of the caches.
inline int64_t cache_bytes(const PagedAttention& step) {
  return step.key_scales != nullptr ? 1 : element_bytes(step.type);
}

inline int64_t first_position(const PagedAttention& step, int64_t position) {
  if (step.window < 0) return position - position % -step.window;
  return step.window == 0 ? 0 : std::max<int64_t>(0, position - step.window + 1);
}

inline int64_t partition_size(const PagedAttention& step) {
  return kPartition * std::max<int64_t>(1, step.whole_group_size / kHeadsPerPartition);
}

inline int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// The states of an item's queries over one partition are one array of floats, in which each part is aligned to cache
// lines.
inline int64_t values_stride(const PagedAttention& step) { return round_up(step.value_size, 16); }
inline int64_t states_size(const PagedAttention& step, int64_t num_queries) {
  return 2 * round_up(num_queries, 16) + num_queries * values_stride(step);
}
// Fill `plan` with items as large as possible, as long as every thread gets some. With too few rows and heads, contexts
// are shared. Return the number of rows with a position. Throws std::invalid_argument for rows or blocks out of range.
int64_t plan_attention(const PagedAttention& step, AttentionPlan& plan);

}  // namespace moeserve
