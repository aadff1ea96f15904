// Attention over a paged KV cache: the division of a step into items, and the merge of partial results.
//
// Positions are cut at fixed places: into blocks, which are reduced one after the other (attention_block.h), and into
// partitions of some blocks, which are reduced separately and then merged in order. The order of additions therefore
// follows from the position of a row and the shapes alone, and a long context can still be shared between threads.
//
// An item is the unit of work of a thread: some rows of a chunk, with some query heads of one key-value head, over some
// partitions. The choice of items changes no bit.

#include "paged_attention.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "attention_block.h"
#include "isa.h"
#include "parallel.h"

namespace moeserve {

namespace {

constexpr int kPartition = 256;         // positions per kHeadsPerPartition heads of a group
constexpr int kHeadsPerPartition = 16;  // keeps the states of a group smaller than its keys and values
constexpr int kMostQueries = 96;    // queries of an item: states and packed operands must fit in the cache of a core
constexpr int kFewQueries = 8;      // queries of an item: with fewer, packing dominates
constexpr int kItemsPerThread = 4;  // enough to balance a delayed thread
constexpr double kWorthThreads = 8e-6;  // seconds of work that justify another thread
constexpr int kWordBytes = 4;

static_assert(kPartition % kBlock == 0);

// Consecutive rows, the first of them at `position`, and the blocks of their context.
struct Chunk {
  int64_t first_row;  // among the tokens
  int64_t num_rows;
  int64_t position;
  const int32_t* blocks;
};

struct Item {
  int32_t chunk;
  int32_t first_row;  // of the chunk
  int32_t num_rows;
  int32_t first_head;
  int32_t num_heads;
  int32_t first_partition;
  int32_t num_partitions;
  int32_t shared;  // index into `Job::shared`; -1: the item covers all partitions that its rows attend to
};

// Rows and heads whose partitions are divided among several items.
struct Shared {
  int64_t first_float;  // of its states in `Job::shared_states`
  int32_t first_partition;
  int32_t num_partitions;
  std::atomic<int32_t> num_missing;  // the item that completes the last partition merges them

  Shared(int64_t first_float, int32_t first, int32_t count)
      : first_float(first_float), first_partition(first), num_partitions(count), num_missing(count) {}
};

// A buffer that is kept from call to call, aligned to cache lines.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { release(); }

  template <typename Number>
  Number* at_least(int64_t count) {
    const auto wanted = static_cast<size_t>(count) * sizeof(Number);
    if (num_bytes_ < wanted) {
      release();
      bytes_ = operator new(wanted, kAlignment);
      num_bytes_ = wanted;
    }
    return static_cast<Number*>(bytes_);
  }

 private:
  static constexpr std::align_val_t kAlignment{64};

  void release() {
    operator delete(bytes_, kAlignment);
    bytes_ = nullptr;
    num_bytes_ = 0;
  }

  void* bytes_ = nullptr;
  size_t num_bytes_ = 0;
};

// Buffers of each thread.
struct Scratch {
  Buffer queries;
  Buffer keys;
  Buffer values;
  Buffer scores;
  Buffer weights;
  Buffer factors;
  Buffer states;
  Buffer zeros;
  Buffer visible;
  // Used by the calling thread, for all threads.
  std::vector<Chunk> chunks;
  std::vector<Item> items;
  std::deque<Shared> shared;
  Buffer shared_states;
};

Scratch& scratch() {
  thread_local Scratch of_this_thread;
  return of_this_thread;
}

struct Job {
  const PagedAttention& step;
  const BlockKernels& kernels;
  std::vector<Chunk>& chunks;
  std::vector<Item>& items;
  std::deque<Shared>& shared;
  float* shared_states;
};

int64_t group_size(const PagedAttention& step) { return step.num_heads / step.num_kv_heads; }

int64_t first_position(const PagedAttention& step, int64_t position) {
  return step.window == 0 ? 0 : std::max<int64_t>(0, position - step.window + 1);
}

int64_t partition_size(const PagedAttention& step) {
  return kPartition * std::max<int64_t>(1, group_size(step) / kHeadsPerPartition);
}

// Return the range of partitions that some rows of a chunk attend to.
int64_t first_partition(const PagedAttention& step, const Chunk& chunk, int64_t first_row) {
  return first_position(step, chunk.position + first_row) / partition_size(step);
}
int64_t end_partition(const PagedAttention& step, const Chunk& chunk, int64_t end_row) {
  return (chunk.position + end_row - 1) / partition_size(step) + 1;
}

int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// The states of the queries of an item over one partition are one array of floats. Each of its parts is aligned to
// cache lines.
int64_t values_stride(const PagedAttention& step) { return round_up(step.value_size, 16); }
int64_t states_size(const PagedAttention& step, int64_t num_queries) {
  return 2 * round_up(num_queries, 16) + num_queries * values_stride(step);
}
States states_at(float* room, int64_t num_queries) {
  return {room, room + round_up(num_queries, 16), room + 2 * round_up(num_queries, 16)};
}

// Addresses of the keys and values of a block.
struct Rows {
  const void* keys[kBlock];
  const void* values[kBlock];
};

// Return the visible positions of a row of an item in the block that starts at position `start`.
Range visible_of(const PagedAttention& step, const Chunk& chunk, const Item& item, int row, int64_t start) {
  const int64_t position = chunk.position + item.first_row + row;
  const int64_t begin = first_position(step, position) - start;
  return {static_cast<int>(std::clamp<int64_t>(begin, 0, kBlock)),
          static_cast<int>(std::clamp<int64_t>(position + 1 - start, 0, kBlock))};
}

// Return the positions visible to any of several consecutive rows, given those of the first and the last row.
Range join(Range first, Range last) { return {first.begin, last.end}; }

// Return the range of positions of an item, from the start of a block on.
int64_t first_start(const PagedAttention& step, const Chunk& chunk, const Item& item) {
  const int64_t first = first_position(step, chunk.position + item.first_row);
  return std::max(item.first_partition * partition_size(step), first) / kBlock * kBlock;
}
int64_t end_position(const PagedAttention& step, const Chunk& chunk, const Item& item) {
  return std::min((item.first_partition + item.num_partitions) * partition_size(step),
                  chunk.position + item.first_row + item.num_rows);
}

// Find the addresses of the positions `visible` in the block that starts at position `start`.
void find_rows(const PagedAttention& step, const Chunk& chunk, const Item& item, int64_t start, Range visible,
               Rows& rows) {
  const auto* keys = static_cast<const char*>(step.key_cache);
  const auto* values = static_cast<const char*>(step.value_cache);
  const int64_t kv_head = item.first_head / group_size(step);
  const int64_t row_bytes = step.head_size * element_bytes(step.type);
  int64_t block = (start + visible.begin) / step.block_size;
  int64_t in_block = (start + visible.begin) % step.block_size;
  for (int p = visible.begin; p < visible.end; ++block, in_block = 0) {
    const int64_t first = (chunk.blocks[block] * step.num_kv_heads + kv_head) * step.block_size + in_block;
    const int count = static_cast<int>(std::min<int64_t>(step.block_size - in_block, visible.end - p));
    for (int i = 0; i < count; ++i) {
      rows.keys[p + i] = keys + (first + i) * row_bytes;
      rows.values[p + i] = values + (first + i) * row_bytes;
    }
    p += count;
  }
}

// The state of an item while it runs.
struct ItemContext {
  const PagedAttention& step;
  const BlockKernels& kernels;
  const Item& item;
  const Chunk& chunk;
  const Item* next;  // the item after this one, or null
  const Chunk* next_chunk;
  const void* zeros;  // a row of zeros
  char* queries;
  void* packed_keys;
  void* packed_values;
  char* weights;
  float* scores;
  float* factors;
  Range* visible;  // [queries], in the current block
  Rows* rows;      // of the current block
  Rows* ahead;     // of the next block

  int head_size() const { return static_cast<int>(step.head_size); }
  int value_size() const { return static_cast<int>(step.value_size); }
  bool is_packed() const { return item.num_rows * item.num_heads > kMaxTile; }
};

bool has_values(const ItemContext& context) { return context.step.value_cache != context.step.key_cache; }

Range visible_of(const ItemContext& context, int row, int64_t start) {
  return visible_of(context.step, context.chunk, context.item, row, start);
}

Range whole_granules(const ItemContext& context, Range range) {
  const int granule = context.kernels.granule;
  return {range.begin / granule * granule, (range.end + granule - 1) / granule * granule};
}

// Replace positions outside of `visible` by rows of zeros, up to whole granules.
void pad_rows(const ItemContext& context, Range visible, Rows& rows) {
  const Range range = whole_granules(context, visible);
  for (int p = range.begin; p < visible.begin; ++p) rows.keys[p] = rows.values[p] = context.zeros;
  for (int p = visible.end; p < range.end; ++p) rows.keys[p] = rows.values[p] = context.zeros;
}

// Find the rows visible to any row of an item in the block that starts at position `start`. Returns their range.
Range find_item_rows(const ItemContext& context, const Chunk& chunk, const Item& item, int64_t start, Rows& rows) {
  const Range visible = join(visible_of(context.step, chunk, item, 0, start),
                             visible_of(context.step, chunk, item, item.num_rows - 1, start));
  find_rows(context.step, chunk, item, start, visible, rows);
  return visible;
}

// Find the rows of the block that this thread reads after the one at `start`, if any. Returns their range.
Range find_next_rows(const ItemContext& context, int64_t start) {
  if (start + kBlock < end_position(context.step, context.chunk, context.item)) {
    return find_item_rows(context, context.chunk, context.item, start + kBlock, *context.ahead);
  }
  if (context.next == nullptr) return {0, 0};
  const int64_t next_start = first_start(context.step, *context.next_chunk, *context.next);
  return find_item_rows(context, *context.next_chunk, *context.next, next_start, *context.ahead);
}

// Call use(kind, first) for tiles that cover the queries [first, end). A tile has kTiles[kind] queries.
template <typename Use>
void for_tiles(int first, int end, const Use& use) {
  for (int kind = 0; first < end;) {
    while (kTiles[kind] > end - first) ++kind;
    use(kind, first);
    first += kTiles[kind];
  }
}

// Update the states of some rows of the item with the block that starts at position `start`.
void attend_rows(const ItemContext& context, int first_row, int num_rows, int64_t start, Range ahead,
                 const States& states) {
  const BlockKernels& kernels = context.kernels;
  const int64_t stride = values_stride(context.step);
  const int64_t query_bytes = int64_t{kernels.key_steps(context.head_size())} * kWordBytes;
  const int64_t weights_bytes = int64_t{kBlock} / kernels.per_word * kWordBytes;
  const int num_heads = context.item.num_heads;
  const int begin = first_row * num_heads;
  const int end = begin + num_rows * num_heads;
  for (int row = first_row, query = begin; row < first_row + num_rows; ++row) {
    const Range visible = visible_of(context, row, start);
    for (int head = 0; head < num_heads; ++head) context.visible[query++] = visible;
  }
  const auto tile_of = [&](int kind, int query) {
    const Range seen = join(context.visible[query], context.visible[query + kTiles[kind] - 1]);
    const States tile_states{states.largest + query, states.weight_sums + query, states.values + query * stride};
    return Tile{context.queries + query * query_bytes,
                context.visible + query,
                seen,
                whole_granules(context, seen),
                context.packed_keys,
                context.packed_values,
                context.rows->keys,
                context.rows->values,
                {context.ahead->keys, ahead},
                {context.ahead->values, has_values(context) ? ahead : Range{0, 0}},
                context.step.scale,
                context.scores,
                tile_states,
                context.weights + query * weights_bytes,
                context.factors + query};
  };

  if (!context.is_packed()) {
    for_tiles(begin, end, [&](int kind, int query) {
      const Tile tile = tile_of(kind, query);
      if (tile.seen.empty()) return;
      kernels.weigh_in_place[kind](tile, context.head_size());
      kernels.add_in_place[kind](tile, context.value_size(), stride);
    });
    return;
  }
  for_tiles(begin, end, [&](int kind, int query) {
    const Tile tile = tile_of(kind, query);
    if (!tile.seen.empty()) kernels.weigh_packed[kind](tile, context.head_size());
  });
  // A strip of values stays in the cache for all tiles.
  for (int strip = 0; strip < kernels.num_strips(context.value_size()); ++strip) {
    for_tiles(begin, end, [&](int kind, int query) {
      const Tile tile = tile_of(kind, query);
      if (!tile.seen.empty()) kernels.add_packed[kind](tile, strip, context.value_size(), stride);
    });
  }
}

// Update the states of all rows of the item with the block that starts at position `start`, which is in `context.rows`.
void attend_block(ItemContext& context, int64_t start, const States& states) {
  const BlockKernels& kernels = context.kernels;
  const int last_row = context.item.num_rows - 1;
  const Range ahead = find_next_rows(context, start);
  // 0 * NaN and 0 * infinity are not 0, so such a value would reach rows that do not attend to it. In this case the
  // rows are processed one by one, with zeros at the other positions.
  int num_rows = context.item.num_rows;
  for (int row = 0; row <= last_row;) {
    const Range first = visible_of(context, row, start);
    const Range last = visible_of(context, row + num_rows - 1, start);
    const Range visible = join(first, last);
    if (visible.empty()) {
      row += num_rows;
      continue;
    }
    const bool all_see_all = last.begin == first.begin && last.end == first.end;
    if (num_rows > 1 && !all_see_all && !kernels.all_finite(context.rows->values, visible, context.value_size())) {
      num_rows = 1;
      continue;
    }
    if (num_rows < context.item.num_rows)
      find_rows(context.step, context.chunk, context.item, start, visible, *context.rows);
    pad_rows(context, visible, *context.rows);
    if (context.is_packed()) {
      const Range range = whole_granules(context, visible);
      const Range ahead_values = has_values(context) ? ahead : Range{0, 0};
      kernels.pack_keys(context.rows->keys, {context.ahead->keys, ahead}, range, context.head_size(),
                        context.packed_keys);
      kernels.pack_values(context.rows->values, {context.ahead->values, ahead_values}, range, context.value_size(),
                          context.packed_values);
    }
    attend_rows(context, row, num_rows, start, ahead, states);
    row += num_rows;
  }
  std::swap(context.rows, context.ahead);
}

// Reduce the positions of one partition that the rows of the item attend to.
void attend_partition(ItemContext& context, int64_t partition, const States& states) {
  const int64_t begin =
      std::max(partition * partition_size(context.step), first_start(context.step, context.chunk, context.item));
  const int64_t end =
      std::min((partition + 1) * partition_size(context.step), end_position(context.step, context.chunk, context.item));
  for (int64_t start = begin; start < end; start += kBlock) attend_block(context, start, states);
}

void run_item(Job& job, size_t index) {
  const PagedAttention& step = job.step;
  const Item& item = job.items[index];
  const Item* next = index + 1 < job.items.size() ? &job.items[index + 1] : nullptr;
  const BlockKernels& kernels = job.kernels;
  const Chunk& chunk = job.chunks[item.chunk];
  const int head_size = static_cast<int>(step.head_size);
  const int value_size = static_cast<int>(step.value_size);
  const int num_queries = item.num_rows * item.num_heads;
  const int64_t query_bytes = int64_t{kernels.key_steps(head_size)} * kWordBytes;
  const int64_t stride = values_stride(step);
  Scratch& room = scratch();

  // Call use(query, index among the heads of all rows).
  const auto for_queries = [&](const auto& use) {
    int query = 0;
    for (int row = 0; row < item.num_rows; ++row) {
      const int64_t first = (chunk.first_row + item.first_row + row) * step.num_heads + item.first_head;
      for (int head = 0; head < item.num_heads; ++head) use(query++, first + head);
    }
  };

  auto* zeros = room.zeros.at_least<char>(step.head_size * element_bytes(step.type));
  std::memset(zeros, 0, step.head_size * element_bytes(step.type));
  auto* queries = room.queries.at_least<char>(num_queries * query_bytes);
  for_queries([&](int query, int64_t index) {
    const int64_t place =
        index / step.num_heads * step.query_token_stride + index % step.num_heads * step.query_head_stride;
    const auto* source = static_cast<const char*>(step.query) + place * element_bytes(step.type);
    kernels.copy_query(source, head_size, queries + query * query_bytes);
  });
  Rows rows[2];
  ItemContext context{step,
                      kernels,
                      item,
                      chunk,
                      next,
                      next == nullptr ? nullptr : &job.chunks[next->chunk],
                      zeros,
                      queries,
                      room.keys.at_least<char>(kernels.packed_keys_size(head_size) * kWordBytes),
                      room.values.at_least<char>(kernels.packed_values_size(value_size) * kWordBytes),
                      room.weights.at_least<char>(int64_t{num_queries} * kBlock / kernels.per_word * kWordBytes),
                      room.scores.at_least<float>(kMaxTile * kBlock),
                      room.factors.at_least<float>(num_queries),
                      room.visible.at_least<Range>(num_queries),
                      &rows[0],
                      &rows[1]};
  find_item_rows(context, chunk, item, first_start(step, chunk, item), *context.rows);

  const int64_t size = states_size(step, num_queries);
  float* own_states = room.states.at_least<float>(2 * size);
  Shared* shared = item.shared < 0 ? nullptr : &job.shared[item.shared];
  const auto states_of = [&](int64_t partition) {
    if (shared == nullptr) return states_at(own_states + (partition == item.first_partition ? 0 : size), num_queries);
    return states_at(job.shared_states + shared->first_float + (partition - shared->first_partition) * size,
                     num_queries);
  };

  States merged = states_of(item.first_partition);
  const int64_t end_partition = item.first_partition + item.num_partitions;
  for (int64_t partition = item.first_partition; partition < end_partition; ++partition) {
    const States states = states_of(partition);
    std::fill_n(states.largest, num_queries, kNoScore);
    std::fill_n(states.weight_sums, num_queries, 0.0f);
    std::memset(states.values, 0, num_queries * stride * sizeof(float));
    attend_partition(context, partition, states);
    if (shared == nullptr && partition > item.first_partition) kernels.merge(merged, states, num_queries, stride);
  }
  if (shared != nullptr) {
    if (shared->num_missing.fetch_sub(item.num_partitions, std::memory_order_acq_rel) != item.num_partitions) return;
    merged = states_of(shared->first_partition);
    for (int i = 1; i < shared->num_partitions; ++i) {
      kernels.merge(merged, states_of(shared->first_partition + i), num_queries, stride);
    }
  }
  for_queries([&](int query, int64_t index) {
    const States state{merged.largest + query, merged.weight_sums + query, merged.values + query * stride};
    const float* sink = step.sinks == nullptr ? nullptr : step.sinks + index % step.num_heads;
    auto* out = static_cast<char*>(step.out) + index * step.value_size * element_bytes(step.type);
    kernels.finish(state, sink, value_size, out);
  });
}

void refuse(const std::string& what) { throw std::invalid_argument("paged_attention: " + what); }

// Collect the rows with a position and check them against the sizes. Returns their number.
int64_t find_chunks(const PagedAttention& step, std::vector<Chunk>& chunks) {
  chunks.clear();
  int64_t num_rows = 0;
  for (int64_t s = 0; s < step.num_chunks; ++s) {
    const int64_t begin = step.row_starts[s];
    const int64_t end = step.row_starts[s + 1];
    if (begin < 0 || end < begin || end > step.num_tokens) {
      refuse("chunk " + std::to_string(s) + " has rows " + std::to_string(begin) + " to " + std::to_string(end) +
             ", but there are " + std::to_string(step.num_tokens) + " tokens");
    }
    const int64_t context_len = step.context_lens[s];
    const int32_t* blocks = step.block_table + s * step.max_blocks;
    const int64_t num_blocks = (context_len + step.block_size - 1) / step.block_size;
    if (context_len < 0 || num_blocks > step.max_blocks) {
      refuse("chunk " + std::to_string(s) + " has a context of " + std::to_string(context_len) +
             " positions, but its blocks hold " + std::to_string(step.max_blocks * step.block_size));
    }
    const int64_t first_row = std::max(begin, end - context_len);
    if (first_row == end) continue;
    const int64_t position = context_len - end + first_row;
    chunks.push_back({first_row, end - first_row, position, blocks});
    num_rows += end - first_row;
    for (int64_t b = first_position(step, position) / step.block_size; b < num_blocks; ++b) {
      if (blocks[b] < 0 || blocks[b] >= step.num_blocks) {
        refuse("chunk " + std::to_string(s) + " has block " + std::to_string(blocks[b]) + ", but there are " +
               std::to_string(step.num_blocks));
      }
    }
  }
  return num_rows;
}

// Return the maximal number of heads and rows of an item.
struct Division {
  int64_t num_heads;
  int64_t num_rows;
};

Division divide(const PagedAttention& step, int64_t num_queries) {
  const int64_t group = group_size(step);
  const int64_t parts = (group + num_queries - 1) / num_queries;
  const int64_t num_heads = (group + parts - 1) / parts;
  return {num_heads, std::max<int64_t>(1, num_queries / num_heads)};
}

// Call use(chunk, first_row, num_rows) for the rows of each item.
template <typename Use>
void for_rows(const std::vector<Chunk>& chunks, const Division& division, const Use& use) {
  for (size_t c = 0; c < chunks.size(); ++c) {
    // Items of similar size, so that the last one is not small.
    const int64_t parts = (chunks[c].num_rows + division.num_rows - 1) / division.num_rows;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = chunks[c].num_rows * part / parts;
      use(static_cast<int32_t>(c), first, chunks[c].num_rows * (part + 1) / parts - first);
    }
  }
}

// Count the items without shared partitions, and all of their partitions.
struct Count {
  int64_t items = 0;
  int64_t partitions = 0;
};

Count count_items(const Job& job, const Division& division) {
  const PagedAttention& step = job.step;
  const int64_t group = group_size(step);
  const int64_t per_rows = step.num_kv_heads * ((group + division.num_heads - 1) / division.num_heads);
  Count count;
  for_rows(job.chunks, division, [&](int32_t chunk, int64_t first_row, int64_t num_rows) {
    count.items += per_rows;
    count.partitions += per_rows * (end_partition(step, job.chunks[chunk], first_row + num_rows) -
                                    first_partition(step, job.chunks[chunk], first_row));
  });
  return count;
}

// Estimate the time that one thread needs for the step, in seconds.
double estimate_seconds(const PagedAttention& step, const std::vector<Chunk>& chunks) {
  double num_pairs = 0;
  double num_read = 0;
  for (const Chunk& chunk : chunks) {
    const int64_t last = chunk.position + chunk.num_rows - 1;
    const int64_t middle = chunk.position + chunk.num_rows / 2;
    num_pairs += static_cast<double>(chunk.num_rows * step.num_heads) * (middle + 1 - first_position(step, middle));
    num_read += static_cast<double>(last + 1 - first_position(step, chunk.position));
  }
  const double sizes = static_cast<double>(step.head_size + step.value_size);
  const double bytes = num_read * step.num_kv_heads * sizes * element_bytes(step.type);
  return num_pairs * sizes * 2 / 80e9 + bytes / 12e9;
}

// Fill `items`: large ones if every thread gets some. A context is shared if there are too few rows and heads.
void plan(Job& job, int num_threads, Buffer& shared_states) {
  const PagedAttention& step = job.step;
  job.items.clear();
  job.shared.clear();
  Division division = divide(step, kMostQueries);
  int64_t most = std::numeric_limits<int32_t>::max();  // maximal number of partitions of an item
  if (num_threads > 1) {
    const int64_t wanted = int64_t{num_threads} * kItemsPerThread;
    Count count = count_items(job, division);
    for (int64_t num_queries = kMostQueries / 2; num_queries >= kFewQueries && count.items < wanted; num_queries /= 2) {
      // Few queries share their context instead: dividing them would repeat the packing.
      if (num_queries < kMostQueries / 4 && count.partitions >= 2 * num_threads) break;
      division = divide(step, num_queries);
      count = count_items(job, division);
    }
    if (count.items < wanted) most = std::max<int64_t>(1, count.partitions / wanted);
  }

  const int64_t group = group_size(step);
  int64_t num_floats = 0;
  for_rows(job.chunks, division, [&](int32_t chunk, int64_t first_row, int64_t num_rows) {
    const auto begin = static_cast<int32_t>(first_partition(step, job.chunks[chunk], first_row));
    const auto end = static_cast<int32_t>(end_partition(step, job.chunks[chunk], first_row + num_rows));
    for (int64_t head = 0, num_heads = 0; head < step.num_heads; head += num_heads) {
      num_heads = std::min(division.num_heads, group - head % group);
      Item item{chunk,
                static_cast<int32_t>(first_row),
                static_cast<int32_t>(num_rows),
                static_cast<int32_t>(head),
                static_cast<int32_t>(num_heads),
                begin,
                end - begin,
                -1};
      if (end - begin <= most) {
        job.items.push_back(item);
        continue;
      }
      item.shared = static_cast<int32_t>(job.shared.size());
      job.shared.emplace_back(num_floats, begin, end - begin);
      num_floats += (end - begin) * states_size(step, num_rows * num_heads);
      for (int64_t first = begin; first < end; first += most) {
        item.first_partition = static_cast<int32_t>(first);
        item.num_partitions = static_cast<int32_t>(std::min(most, end - first));
        job.items.push_back(item);
      }
    }
  });
  job.shared_states = shared_states.at_least<float>(num_floats);
}

}  // namespace

void paged_attention(const PagedAttention& step) {
  Scratch& room = scratch();
  const int64_t num_rows = find_chunks(step, room.chunks);
  if (num_rows < step.num_tokens) {
    std::memset(step.out, 0, step.num_tokens * step.num_heads * step.value_size * element_bytes(step.type));
  }
  if (room.chunks.empty() || step.num_heads == 0) return;
  Job job{step, choose_block_kernels(current_isa(), step.type), room.chunks, room.items, room.shared, nullptr};
  const int threads = estimate_seconds(step, room.chunks) < kWorthThreads ? 1 : num_threads();
  plan(job, threads, room.shared_states);
  if (threads == 1) {
    for (size_t i = 0; i < job.items.size(); ++i) run_item(job, i);
  } else {
    parallel_for(static_cast<int64_t>(job.items.size()), [&](int64_t i) { run_item(job, static_cast<size_t>(i)); });
  }
}

}  // namespace moeserve
