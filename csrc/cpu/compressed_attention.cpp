// Windows are pooled token by token: the softmax over the gates of a window is kept as the largest gate, the sum of
// exponentials, and the weighted sum of values, for each channel. So there is one order of sums for all chunks.

#include "compressed_attention.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "isa.h"
#include "lanes.h"
#include "parallel.h"
#include "partial_lanes.h"
#include "rows.h"

namespace moeserve {

namespace {

constexpr float kNoGate = -1e30f;  // below any gate; the exponential of the difference is tiny, and its factor is zero

void refuse(const std::string& what) { throw std::invalid_argument("compressed attention: " + what); }

void check_chunks(const ChunksOfRequests& chunks) {
  for (int64_t s = 0; s < chunks.num_chunks; ++s) {
    const int64_t begin = chunks.row_starts[s], end = chunks.row_starts[s + 1], length = chunks.context_lens[s];
    if (begin < 0 || end < begin || end > chunks.num_tokens) {
      refuse("chunk " + std::to_string(s) + " has rows " + std::to_string(begin) + " to " + std::to_string(end) +
             ", but there are " + std::to_string(chunks.num_tokens) + " tokens");
    }
    const int64_t num_blocks = (length + chunks.block_size - 1) / chunks.block_size;
    if (length < 0 || num_blocks > chunks.max_blocks) {
      refuse("chunk " + std::to_string(s) + " has a context of " + std::to_string(length) +
             " positions, but its blocks hold " + std::to_string(chunks.max_blocks * chunks.block_size));
    }
    for (int64_t b = 0; b < num_blocks; ++b) {
      const int32_t block = chunks.block_table[s * chunks.max_blocks + b];
      if (block < 0 || block >= chunks.num_blocks) {
        refuse("chunk " + std::to_string(s) + " has block " + std::to_string(block) + ", but there are " +
               std::to_string(chunks.num_blocks));
      }
    }
  }
  for (int64_t t = 0; t < chunks.num_tokens; ++t) {
    if (chunks.slots[t] >= chunks.num_blocks * chunks.block_size) {
      refuse("slot " + std::to_string(chunks.slots[t]) + ", but the blocks hold " +
             std::to_string(chunks.num_blocks * chunks.block_size) + " tokens");
    }
  }
}

// The softmax over some tokens of a window.
template <int W>
struct Tail {
  Float<W> largest = broadcast<W>(kNoGate);
  Float<W> sum = {};
  Float<W> values = {};

  MOESERVE_INLINE void add(Float<W> gate, Float<W> value) {
    const Float<W> new_largest = larger<W>(largest, gate);
    const Float<W> factor = exp_of_nonpositive<W>(largest - new_largest);
    const Float<W> weight = exp_of_nonpositive<W>(gate - new_largest);
    largest = new_largest;
    sum = sum * factor + weight;
    values = values * factor + weight * value;
  }
};

template <int W, typename Element>
MOESERVE_INLINE void pool_lanes(const WindowPooling& step, int64_t chunk, int64_t first, int64_t count) {
  const ChunksOfRequests& chunks = step.chunks;
  const int64_t begin = chunks.row_starts[chunk], end = chunks.row_starts[chunk + 1];
  const int64_t start = chunks.context_lens[chunk] - (end - begin);
  const int64_t last_kept = end - 1 - (step.num_drafts == nullptr ? 0 : step.num_drafts[chunk]);
  const int32_t* blocks = chunks.block_table + chunk * chunks.max_blocks;
  const int64_t width = step.num_series * step.size;
  const auto tail_at = [&](int64_t position, int64_t series) {
    return step.tails + (blocks[position / chunks.block_size] * step.num_series + series) * 3 * step.size + first;
  };
  // The entry of the current window, and that of the next one. In the projection, the latter come first.
  Tail<W> tails[2];
  for (int64_t series = 0; start > 0 && series < step.num_series; ++series) {
    const float* kept = tail_at(start - 1, series);
    tails[series].largest = load_lanes<W>(kept, count);
    tails[series].sum = load_lanes<W>(kept + step.size, count);
    tails[series].values = load_lanes<W>(kept + 2 * step.size, count);
  }
  for (int64_t row = begin; row < end; ++row) {
    const int64_t position = start + row - begin, offset = position % step.ratio;
    const auto* values = static_cast<const Element*>(step.projected) + row * step.row_stride + first;
    const Element* gates = values + width;
    const float* bias = step.bias + offset * width + first;
    if (offset == 0) {
      tails[0] = tails[1];
      tails[1] = Tail<W>();
    }
    for (int64_t series = 0; series < step.num_series; ++series) {
      const int64_t column = (step.num_series - 1 - series) * step.size;
      tails[series].add(load_lanes<W>(gates + column, count) + load_lanes<W>(bias + column, count),
                        load_lanes<W>(values + column, count));
    }
    Element* out = static_cast<Element*>(step.out) + row * step.size + first;
    store_lanes<W>(out, offset == step.ratio - 1 ? tails[0].values / tails[0].sum : Float<W>{}, count);
    if (row == last_kept || (row < last_kept && (position + 1) % chunks.block_size == 0)) {
      for (int64_t series = 0; series < step.num_series; ++series) {
        float* kept = tail_at(position, series);
        store_lanes<W>(kept, tails[series].largest, count);
        store_lanes<W>(kept + step.size, tails[series].sum, count);
        store_lanes<W>(kept + 2 * step.size, tails[series].values, count);
      }
    }
  }
}

template <int W, typename Element>
MOESERVE_INLINE void pool_part(const WindowPooling& step, int64_t chunk, int64_t first, int64_t last) {
  for (int64_t c = first; c < last; c += W) pool_lanes<W, Element>(step, chunk, c, std::min<int64_t>(W, last - c));
}

MOESERVE_DEFINE_TYPED_VARIANTS(pool_part, step.type,
                               (const WindowPooling& step, int64_t chunk, int64_t first, int64_t last),
                               (step, chunk, first, last))

// Return true if the chunk's first row has a position and is stored.
bool is_stored(const ChunksOfRequests& chunks, int64_t chunk) {
  const int64_t begin = chunks.row_starts[chunk], end = chunks.row_starts[chunk + 1];
  return begin < end && chunks.context_lens[chunk] >= end - begin && chunks.slots[begin] >= 0;
}

void check_drafts(const WindowPooling& step) {
  for (int64_t s = 0; step.num_drafts != nullptr && s < step.chunks.num_chunks; ++s) {
    const int64_t num_rows = step.chunks.row_starts[s + 1] - step.chunks.row_starts[s];
    if (step.num_drafts[s] < 0 || step.num_drafts[s] > num_rows) {
      refuse("chunk " + std::to_string(s) + " has " + std::to_string(num_rows) + " rows, of which " +
             std::to_string(step.num_drafts[s]) + " are drafts");
    }
  }
}

// Return the index of the entry that ends in a block among those of the block, which starts at a multiple of its size.
int64_t place_in_block(int64_t entry, int64_t block_start, int64_t ratio) { return entry - block_start / ratio; }

}  // namespace

void pool_windows(const WindowPooling& pooling) {
  constexpr int64_t kPart = 256;  // channels that a thread computes at a time
  check_chunks(pooling.chunks);
  check_drafts(pooling);
  const auto run = choose_pool_part_of_type(current_isa());
  const int64_t num_parts = (pooling.size + kPart - 1) / kPart;
  std::memset(pooling.out, 0, pooling.chunks.num_tokens * pooling.size * element_bytes(pooling.type));
  const auto run_item = [&](int64_t item) {
    const int64_t chunk = item / num_parts, first = item % num_parts * kPart;
    if (is_stored(pooling.chunks, chunk)) run(pooling, chunk, first, std::min(first + kPart, pooling.size));
  };
  const int64_t num_items = pooling.chunks.num_chunks * num_parts;
  if (pooling.chunks.num_tokens * pooling.size * pooling.num_series < 16 * 1024) {
    for (int64_t item = 0; item < num_items; ++item) run_item(item);
  } else {
    parallel_for(num_items, run_item);
  }
}

void find_entry_slots(const ChunksOfRequests& chunks, int64_t ratio, int64_t entries_of_block, int64_t* slots) {
  check_chunks(chunks);
  std::fill_n(slots, chunks.num_tokens, -1);
  for (int64_t s = 0; s < chunks.num_chunks; ++s) {
    const int64_t end = chunks.row_starts[s + 1];
    for (int64_t t = chunks.row_starts[s]; t < end; ++t) {
      const int64_t position = chunks.context_lens[s] - end + t, slot = chunks.slots[t];
      if (position < 0 || slot < 0 || (position + 1) % ratio != 0) continue;
      const int64_t place = place_in_block(position / ratio, position - slot % chunks.block_size, ratio);
      slots[t] = slot / chunks.block_size * entries_of_block + place;
    }
  }
}

namespace {

// Return the number of vectors that a row at a position attends to.
int64_t count_vectors(const VectorLists& lists, int64_t row, int64_t position) {
  const int64_t in_window = std::min(position + 1, lists.window);
  if (lists.chosen != nullptr) return in_window + lists.chosen_counts[row];
  return in_window + (lists.ratio > 0 ? (position + 1) / lists.ratio : 0);
}

int64_t first_in_window(const VectorLists& lists, int64_t position) {
  return std::max<int64_t>(0, position - lists.window + 1);
}

void check_lists(const ChunksOfRequests& chunks, const VectorLists& lists) {
  check_chunks(chunks);
  for (int64_t s = 0; s < chunks.num_chunks; ++s) {
    const int64_t end = chunks.row_starts[s + 1], last = chunks.context_lens[s] - 1;
    for (int64_t t = chunks.row_starts[s]; t < end; ++t) {
      const int64_t position = last - (end - 1 - t);
      if (position < 0) continue;
      if (lists.chosen != nullptr && (lists.chosen_counts[t] < 0 || lists.chosen_counts[t] > lists.num_places)) {
        refuse("row " + std::to_string(t) + " has " + std::to_string(lists.chosen_counts[t]) + " chosen entries of " +
               std::to_string(lists.num_places));
      }
      if (count_vectors(lists, t, position) > lists.num_listed) {
        refuse("row " + std::to_string(t) + " attends to " + std::to_string(count_vectors(lists, t, position)) +
               " vectors, but there are places for " + std::to_string(lists.num_listed));
      }
    }
    const int64_t first = std::max<int64_t>(0, last + 1 - (end - chunks.row_starts[s]));
    for (int64_t b = first_in_window(lists, first) / chunks.block_size; b * chunks.block_size <= last; ++b) {
      const int32_t block = lists.window_table[s * chunks.max_blocks + b];
      if (block < 0 || block >= lists.num_window_blocks) {
        refuse("chunk " + std::to_string(s) + " has block " + std::to_string(block) + " of tokens, but there are " +
               std::to_string(lists.num_window_blocks));
      }
    }
  }
}

void list_row(const ChunksOfRequests& chunks, const VectorLists& lists, int64_t chunk, int64_t row, int64_t position) {
  const int64_t block_size = chunks.block_size, first_entry = lists.num_window_blocks * block_size;
  const int32_t* blocks = chunks.block_table + chunk * chunks.max_blocks;
  const int32_t* window_blocks = lists.window_table + chunk * chunks.max_blocks;
  int32_t* next = lists.listed + row * lists.num_listed;
  for (int64_t p = first_in_window(lists, position); p <= position; ++p) {
    *next++ = static_cast<int32_t>(window_blocks[p / block_size] * block_size + p % block_size);
  }
  if (lists.chosen != nullptr) {
    const int32_t* chosen = lists.chosen + row * lists.num_places;
    for (int64_t i = 0; i < lists.chosen_counts[row]; ++i) *next++ = static_cast<int32_t>(first_entry + chosen[i]);
  } else {
    const int64_t num_entries = lists.ratio > 0 ? (position + 1) / lists.ratio : 0;
    for (int64_t entry = 0; entry < num_entries; ++entry) {
      const int64_t block = ((entry + 1) * lists.ratio - 1) / block_size;  // in which its window ends
      const int64_t place = place_in_block(entry, block * block_size, lists.ratio);
      *next++ = static_cast<int32_t>(first_entry + blocks[block] * lists.entries_of_block + place);
    }
  }
  lists.counts[row] = static_cast<int32_t>(next - (lists.listed + row * lists.num_listed));
}

}  // namespace

void list_vectors(const ChunksOfRequests& chunks, const VectorLists& lists) {
  check_lists(chunks, lists);
  std::fill_n(lists.counts, chunks.num_tokens, 0);
  std::iota(lists.starts, lists.starts + chunks.num_tokens + 1, 0);
  for (int64_t s = 0; s < chunks.num_chunks; ++s) {
    const int64_t begin = chunks.row_starts[s], end = chunks.row_starts[s + 1];
    for_rows(end - begin, lists.num_listed * static_cast<int64_t>(sizeof(int32_t)), [&](int64_t first, int64_t last) {
      for (int64_t t = begin + first; t < begin + last; ++t) {
        const int64_t position = chunks.context_lens[s] - end + t;
        if (position >= 0) list_row(chunks, lists, s, t, position);
      }
    });
  }
}

}  // namespace moeserve
