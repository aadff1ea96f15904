// Choice of the items from the numbers of rows, heads and positions, and validation of the step.

#include "attention_plan.h"

#include <limits>
#include <stdexcept>
#include <string>

#include "parallel.h"

namespace moeserve {

namespace {

constexpr int kMostQueries = 96;        // maximum queries of an item, whose states must fit in a core's cache
constexpr int kFewQueries = 8;          // minimum queries of an item: with fewer, packing dominates
constexpr int kItemsPerThread = 4;      // enough to compensate for a delayed thread
constexpr double kWorthThreads = 8e-6;  // seconds of work that justify another thread

// Return the range of partitions that rows of a chunk attend to, from the first row and the end of the rows.
int64_t first_partition(const PagedAttention& step, const Chunk& chunk, int64_t first_row) {
  return first_position(step, chunk.position + first_row) / partition_size(step);
}
int64_t end_partition(const PagedAttention& step, const Chunk& chunk, int64_t end_row) {
  return (chunk.position + end_row - 1) / partition_size(step) + 1;
}

void refuse(const std::string& what) { throw std::invalid_argument("paged_attention: " + what); }

// Collect the chunks with positions, and validate them against the sizes. Return their number of rows.
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

// The maximum number of heads and of rows of an item.
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
    // Items have similar sizes, so that the last one is not small.
    const int64_t parts = (chunks[c].num_rows + division.num_rows - 1) / division.num_rows;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = chunks[c].num_rows * part / parts;
      use(static_cast<int32_t>(c), first, chunks[c].num_rows * (part + 1) / parts - first);
    }
  }
}

// The number of items before partitions are shared, and the number of partitions of all items.
struct Count {
  int64_t items = 0;
  int64_t partitions = 0;
};

Count count_items(const PagedAttention& step, const std::vector<Chunk>& chunks, const Division& division) {
  const int64_t group = group_size(step);
  const int64_t per_rows = step.num_kv_heads * ((group + division.num_heads - 1) / division.num_heads);
  Count count;
  for_rows(chunks, division, [&](int32_t chunk, int64_t first_row, int64_t num_rows) {
    count.items += per_rows;
    count.partitions += per_rows * (end_partition(step, chunks[chunk], first_row + num_rows) -
                                    first_partition(step, chunks[chunk], first_row));
  });
  return count;
}

// Estimate the seconds that one thread needs for the step.
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
  const double bytes = num_read * step.num_kv_heads * sizes * cache_bytes(step);
  return num_pairs * sizes * 2 / 80e9 + bytes / 12e9;
}

}  // namespace

int64_t plan_attention(const PagedAttention& step, AttentionPlan& plan) {
  const std::vector<Chunk>& chunks = plan.chunks;
  const int64_t all_rows = find_chunks(step, plan.chunks);
  plan.items.clear();
  plan.shared.clear();
  plan.num_threads = estimate_seconds(step, chunks) < kWorthThreads ? 1 : num_threads();
  Division division = divide(step, kMostQueries);
  int64_t most = std::numeric_limits<int32_t>::max();  // maximum number of partitions of an item
  if (plan.num_threads > 1) {
    const int64_t wanted = int64_t{plan.num_threads} * kItemsPerThread;
    Count count = count_items(step, chunks, division);
    for (int64_t num_queries = kMostQueries / 2; num_queries >= kFewQueries && count.items < wanted; num_queries /= 2) {
      // If there are few queries, their context is shared instead, because dividing them would repeat the packing.
      if (num_queries < kMostQueries / 4 && count.partitions >= 2 * plan.num_threads) break;
      division = divide(step, num_queries);
      count = count_items(step, chunks, division);
    }
    if (count.items < wanted) most = std::max<int64_t>(1, count.partitions / wanted);
  }

  const int64_t group = group_size(step);
  int64_t num_floats = 0;
  for_rows(chunks, division, [&](int32_t chunk, int64_t first_row, int64_t num_rows) {
    const auto begin = static_cast<int32_t>(first_partition(step, chunks[chunk], first_row));
    const auto end = static_cast<int32_t>(end_partition(step, chunks[chunk], first_row + num_rows));
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
        plan.items.push_back(item);
        continue;
      }
      item.shared = static_cast<int32_t>(plan.shared.size());
      plan.shared.emplace_back(num_floats, begin, end - begin);
      num_floats += (end - begin) * states_size(step, num_rows * num_heads);
      for (int64_t first = begin; first < end; first += most) {
        item.first_partition = static_cast<int32_t>(first);
        item.num_partitions = static_cast<int32_t>(std::min(most, end - first));
        plan.items.push_back(item);
      }
    }
  });
  plan.num_shared_floats = num_floats;
  return all_rows;
}

}  // namespace moeserve
