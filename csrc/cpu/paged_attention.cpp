// Attention over a paged KV cache: the work of an item, and the merge of partial results.
//
// Positions are divided at fixed places: into blocks, which are reduced one after another (attention_block.h), and into
// partitions of several blocks, which are reduced separately and then merged in order. The order of additions therefore
// depends only on the position of a row and on the shapes, although threads can share a long context.

#include "paged_attention.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <utility>

#include "attention_block.h"
#include "attention_plan.h"
#include "isa.h"
#include "parallel.h"

namespace moeserve {

namespace {

constexpr int kWordBytes = 4;

// A buffer aligned to cache lines, which is kept from call to call.
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

// The buffers of one thread.
struct Scratch {
  Buffer queries;
  Buffer packed;
  Buffer scores;
  Buffer weights;
  Buffer factors;
  Buffer states;
  Buffer zeros;
  Buffer converted;
  Buffer visible;
  Buffer biases;
  Buffer own_positions;
  // Used by the calling thread on behalf of all threads.
  AttentionPlan plan;
  Buffer shared_states;
};

Scratch& scratch() {
  thread_local Scratch of_this_thread;
  return of_this_thread;
}

struct Job {
  const PagedAttention& step;
  const BlockKernels& kernels;
  AttentionPlan& plan;
  float* shared_states;
};

States states_at(float* room, int64_t num_queries) {
  return {room, room + round_up(num_queries, 16), room + 2 * round_up(num_queries, 16)};
}

// The addresses of the keys and values of a block, and their row indices in the caches.
struct Rows {
  const void* keys[kBlock];
  const void* values[kBlock];
  int64_t indices[kBlock];
};

// Return the positions of the block at `start` that a row of an item attends to.
Range visible_of(const PagedAttention& step, const Chunk& chunk, const Item& item, int row, int64_t start) {
  const int64_t position = chunk.position + item.first_row + row;
  const int64_t begin = first_position(step, position) - start;
  return {static_cast<int>(std::clamp<int64_t>(begin, 0, kBlock)),
          static_cast<int>(std::clamp<int64_t>(position + 1 - start, 0, kBlock))};
}

// Return the positions visible to any of several consecutive rows, from those of the first and the last row.
Range join(Range first, Range last) { return {first.begin, last.end}; }

// Return the range of an item's positions, extended to the start of a block.
int64_t first_start(const PagedAttention& step, const Chunk& chunk, const Item& item) {
  const int64_t first = first_position(step, chunk.position + item.first_row);
  return std::max(item.first_partition * partition_size(step), first) / kBlock * kBlock;
}
int64_t end_position(const PagedAttention& step, const Chunk& chunk, const Item& item) {
  return std::min((item.first_partition + item.num_partitions) * partition_size(step),
                  chunk.position + item.first_row + item.num_rows);
}

// Find the addresses of the positions `visible` of the block that starts at `start`.
void find_rows(const PagedAttention& step, const Chunk& chunk, const Item& item, int64_t start, Range visible,
               Rows& rows) {
  const auto* keys = static_cast<const char*>(step.key_cache);
  const auto* values = static_cast<const char*>(step.value_cache);
  const int64_t kv_head = item.first_head / group_size(step);
  const int64_t key_bytes = step.head_size * cache_bytes(step);
  const int64_t value_bytes = keys == values ? key_bytes : step.value_size * cache_bytes(step);
  int64_t block = (start + visible.begin) / step.block_size;
  int64_t in_block = (start + visible.begin) % step.block_size;
  for (int p = visible.begin; p < visible.end; ++block, in_block = 0) {
    const int64_t first = (chunk.blocks[block] * step.num_kv_heads + kv_head) * step.block_size + in_block;
    const int count = static_cast<int>(std::min<int64_t>(step.block_size - in_block, visible.end - p));
    for (int i = 0; i < count; ++i) {
      rows.keys[p + i] = keys + (first + i) * key_bytes;
      rows.values[p + i] = values + (first + i) * value_bytes;
      rows.indices[p + i] = first + i;
    }
    p += count;
  }
}

// The state of an item while it is processed.
struct ItemContext {
  const PagedAttention& step;
  const BlockKernels& kernels;
  const Item& item;
  const Chunk& chunk;
  const Item* next;  // the next item of this thread, or null
  const Chunk* next_chunk;
  const void* zeros;  // a row of zeros
  char* converted;    // for 8-bit floats: converted keys, then values, of the current block
  char* queries;
  void* packed;  // keys, then values of the current block
  char* weights;
  float* scores;
  float* factors;
  Range* visible;          // [queries], in the current block
  const void** biases;     // [queries], or null
  int64_t* own_positions;  // [queries], relative to the current block
  Rows* rows;              // rows of the current block
  Rows* ahead;             // rows of the next block

  int head_size() const { return static_cast<int>(step.head_size); }
  int value_size() const { return static_cast<int>(step.value_size); }
  // Packing pays off if several tiles use the packed keys.
  bool packs_keys() const { return item.num_rows * item.num_heads > kernels.max_queries(); }
  bool packs_values() const { return packs_keys() || kernels.tiles->add_in_place == nullptr; }
};

bool has_values(const ItemContext& context) { return context.step.value_cache != context.step.key_cache; }

Range visible_of(const ItemContext& context, int row, int64_t start) {
  return visible_of(context.step, context.chunk, context.item, row, start);
}

Range whole_granules(const ItemContext& context, Range range) {
  const int granule = context.kernels.granule;
  return {range.begin / granule * granule, (range.end + granule - 1) / granule * granule};
}

// Replace positions outside of `visible` with rows of zeros, up to whole granules.
void pad_rows(const ItemContext& context, Range visible, Rows& rows) {
  const Range range = whole_granules(context, visible);
  for (int p = range.begin; p < visible.begin; ++p) rows.keys[p] = rows.values[p] = context.zeros;
  for (int p = visible.end; p < range.end; ++p) rows.keys[p] = rows.values[p] = context.zeros;
}

// Find the rows of the block at `start` that are visible to any row of an item. Return their range.
Range find_item_rows(const ItemContext& context, const Chunk& chunk, const Item& item, int64_t start, Rows& rows) {
  const Range visible = join(visible_of(context.step, chunk, item, 0, start),
                             visible_of(context.step, chunk, item, item.num_rows - 1, start));
  find_rows(context.step, chunk, item, start, visible, rows);
  return visible;
}

bool is_float8(const ItemContext& context) { return context.step.key_scales != nullptr; }

// Return the memory of converted values, behind that of converted keys.
char* converted_values(const ItemContext& context) {
  return context.converted + kBlock * context.step.head_size * element_bytes(context.step.type);
}

// Replace the addresses of 8-bit floats with those of the converted rows.
void use_converted(const ItemContext& context, Range visible, Rows& rows) {
  const int64_t width = element_bytes(context.step.type);
  for (int p = visible.begin; p < visible.end; ++p) {
    rows.keys[p] = context.converted + p * context.step.head_size * width;
    rows.values[p] = converted_values(context) + p * context.step.value_size * width;
  }
}

// Convert the rows of the current block, and prefetch the rows of the next block.
void convert_rows(const ItemContext& context, Range visible, Range ahead) {
  const PagedAttention& step = context.step;
  Rows& rows = *context.rows;
  context.kernels.decode_float8(
      {rows.keys, rows.indices, step.key_scales, visible, {context.ahead->keys, ahead}, context.converted},
      context.head_size());
  char* values = converted_values(context);
  context.kernels.decode_float8(
      {rows.values, rows.indices, step.value_scales, visible, {context.ahead->values, ahead}, values},
      context.value_size());
  use_converted(context, visible, rows);
}

// Find the rows of the block that this thread reads after the block at `start`, if any. Return their range.
Range find_next_rows(const ItemContext& context, int64_t start) {
  if (start + kBlock < end_position(context.step, context.chunk, context.item)) {
    return find_item_rows(context, context.chunk, context.item, start + kBlock, *context.ahead);
  }
  if (context.next == nullptr) return {0, 0};
  const int64_t next_start = first_start(context.step, *context.next_chunk, *context.next);
  return find_item_rows(context, *context.next_chunk, *context.next, next_start, *context.ahead);
}

// Call use(tile kernels, first query, number of queries) for tiles that cover the queries [first, end).
template <typename Use>
void for_tiles(const BlockKernels& kernels, int first, int end, const Use& use) {
  const TileKernels* tile = kernels.tiles;
  const TileKernels* last = tile + kernels.num_tiles - 1;
  for (int count; first < end; first += count) {
    while (tile < last && tile->num_queries > end - first) ++tile;
    count = std::min(tile->num_queries, end - first);
    use(*tile, first, count);
  }
}

// Update the states of some rows of the item with the block at `start`.
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
    const int64_t own = context.chunk.position + context.item.first_row + row - start;
    for (int head = 0; head < num_heads; ++head, ++query) {
      context.visible[query] = visible;
      context.own_positions[query] = own;
    }
  }
  const auto tile_of = [&](int query, int count) {
    const Range seen = join(context.visible[query], context.visible[query + count - 1]);
    const States tile_states{states.largest + query, states.weight_sums + query, states.values + query * stride};
    return Tile{count,
                context.queries + query * query_bytes,
                context.visible + query,
                seen,
                whole_granules(context, seen),
                context.packed,
                context.rows->keys,
                context.rows->values,
                {context.ahead->keys, ahead},
                {context.ahead->values, has_values(context) ? ahead : Range{0, 0}},
                context.step.scale * kLog2E,
                context.scores,
                tile_states,
                context.weights + query * weights_bytes,
                context.factors + query,
                context.biases == nullptr ? nullptr : context.biases + query,
                context.own_positions + query,
                context.step.num_distances};
  };

  const Range range = whole_granules(context, join(context.visible[begin], context.visible[end - 1]));
  if (context.packs_keys()) {
    kernels.pack_keys(context.rows->keys, {context.ahead->keys, ahead}, range, context.head_size(), context.packed);
  }
  for_tiles(kernels, begin, end, [&](const TileKernels& of_tile, int query, int count) {
    const Tile tile = tile_of(query, count);
    if (tile.seen.empty()) return;
    (context.packs_keys() ? of_tile.weigh_packed : of_tile.weigh_in_place)(tile, context.head_size());
  });
  if (!context.packs_values()) {
    for_tiles(kernels, begin, end, [&](const TileKernels& of_tile, int query, int count) {
      const Tile tile = tile_of(query, count);
      if (!tile.seen.empty()) of_tile.add_in_place(tile, context.value_size(), stride);
    });
    return;
  }
  const Range ahead_values = context.packs_keys() && has_values(context) ? ahead : Range{0, 0};
  kernels.pack_values(context.rows->values, {context.ahead->values, ahead_values}, range, context.value_size(),
                      context.packed);
  // A strip of values stays in the cache while all tiles use it.
  for (int strip = 0; strip < kernels.num_strips(context.value_size()); ++strip) {
    for_tiles(kernels, begin, end, [&](const TileKernels& of_tile, int query, int count) {
      const Tile tile = tile_of(query, count);
      if (!tile.seen.empty()) of_tile.add_packed(tile, strip, context.value_size(), stride);
    });
  }
}

// Update the states of all rows of the item with the block at `start`, whose rows are in `context.rows`.
void attend_block(ItemContext& context, int64_t start, const States& states) {
  const BlockKernels& kernels = context.kernels;
  const int last_row = context.item.num_rows - 1;
  Range ahead = find_next_rows(context, start);
  if (is_float8(context)) {
    convert_rows(context, join(visible_of(context, 0, start), visible_of(context, last_row, start)), ahead);
    ahead = {0, 0};
  }
  // 0 * NaN and 0 * infinity are not 0, so such a value would reach rows that do not attend to it. If there is one, the
  // rows are processed one by one, with zeros at the positions that they do not attend to.
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
    if (num_rows < context.item.num_rows) {  // some rows may have been replaced with zeros
      find_rows(context.step, context.chunk, context.item, start, visible, *context.rows);
      if (is_float8(context)) use_converted(context, visible, *context.rows);
    }
    pad_rows(context, visible, *context.rows);
    attend_rows(context, row, num_rows, start, ahead, states);
    row += num_rows;
  }
  std::swap(context.rows, context.ahead);
}

// Reduce the positions of one partition that the item's rows attend to.
void attend_partition(ItemContext& context, int64_t partition, const States& states) {
  const int64_t begin =
      std::max(partition * partition_size(context.step), first_start(context.step, context.chunk, context.item));
  const int64_t end =
      std::min((partition + 1) * partition_size(context.step), end_position(context.step, context.chunk, context.item));
  for (int64_t start = begin; start < end; start += kBlock) attend_block(context, start, states);
}

// Holds this thread's tile registers while it processes an item.
class TileRegisters {
 public:
  explicit TileRegisters(const BlockKernels& kernels) : release_(kernels.release) {
    if (kernels.configure != nullptr) kernels.configure();
  }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
  ~TileRegisters() {
    if (release_ != nullptr) release_();
  }

 private:
  void (*release_)();
};

void run_item(Job& job, size_t index) {
  const PagedAttention& step = job.step;
  const Item& item = job.plan.items[index];
  const Item* next = index + 1 < job.plan.items.size() ? &job.plan.items[index + 1] : nullptr;
  const BlockKernels& kernels = job.kernels;
  const Chunk& chunk = job.plan.chunks[item.chunk];
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
  // Tile registers read whole tiles, even if there are fewer queries.
  const int num_read = num_queries + kernels.max_queries() - 1;
  auto* queries = room.queries.at_least<char>(num_read * query_bytes);
  for_queries([&](int query, int64_t index) {
    const int64_t place =
        index / step.num_heads * step.query_token_stride + index % step.num_heads * step.query_head_stride;
    const auto* source = static_cast<const char*>(step.query) + place * element_bytes(step.type);
    kernels.copy_query(source, head_size, queries + query * query_bytes);
  });
  const int64_t packed_size = std::max(kernels.packed_keys_size(head_size), kernels.packed_values_size(value_size));
  const int64_t converted_size =
      step.key_scales == nullptr ? 0 : kBlock * (step.head_size + step.value_size) * element_bytes(step.type);
  const TileRegisters registers(kernels);
  Rows rows[2];
  ItemContext context{step,
                      kernels,
                      item,
                      chunk,
                      next,
                      next == nullptr ? nullptr : &job.plan.chunks[next->chunk],
                      zeros,
                      room.converted.at_least<char>(converted_size),
                      queries,
                      room.packed.at_least<char>(packed_size * kWordBytes),
                      room.weights.at_least<char>(int64_t{num_read} * kBlock / kernels.per_word * kWordBytes),
                      room.scores.at_least<float>(kernels.max_queries() * kBlock),
                      room.factors.at_least<float>(num_queries),
                      room.visible.at_least<Range>(num_queries),
                      step.biases == nullptr ? nullptr : room.biases.at_least<const void*>(num_queries),
                      room.own_positions.at_least<int64_t>(num_queries),
                      &rows[0],
                      &rows[1]};
  if (step.biases != nullptr) {
    const int64_t num_bytes = step.num_distances * element_bytes(step.type);
    for_queries([&](int query, int64_t index) {
      context.biases[query] = static_cast<const char*>(step.biases) + index * num_bytes;
    });
  }
  find_item_rows(context, chunk, item, first_start(step, chunk, item), *context.rows);

  const int64_t size = states_size(step, num_queries);
  float* own_states = room.states.at_least<float>(2 * size);
  Shared* shared = item.shared < 0 ? nullptr : &job.plan.shared[item.shared];
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
    const float* sink =
        step.sinks == nullptr ? nullptr : step.sinks + (step.has_token_sinks ? index : index % step.num_heads);
    auto* out = static_cast<char*>(step.out) + index * step.value_size * element_bytes(step.type);
    kernels.finish(state, sink, value_size, out);
  });
}

}  // namespace

void paged_attention(const PagedAttention& step) {
  Scratch& room = scratch();
  const int64_t num_rows = plan_attention(step, room.plan);
  if (num_rows < step.num_tokens) {
    std::memset(step.out, 0, step.num_tokens * step.num_heads * step.value_size * element_bytes(step.type));
  }
  float* shared_states = room.shared_states.at_least<float>(room.plan.num_shared_floats);
  Job job{step, choose_block_kernels(current_isa(), step.type), room.plan, shared_states};
  const auto run = [&](int64_t i) { run_item(job, static_cast<size_t>(i)); };
  const auto num_items = static_cast<int64_t>(room.plan.items.size());
  if (room.plan.num_threads == 1) {
    for (int64_t i = 0; i < num_items; ++i) run(i);
  } else {
    parallel_for(num_items, run);
  }
}

}  // namespace moeserve
