// Scores of the entries that a row sees, and the choice of the highest.
//
// The heads of a row are the queries of a tile of attention. Packed keys serve all heads of some consecutive rows.
// Scores of long contexts are computed by several threads, and the entries of each row are chosen by one.

#include "indexer.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "aligned_memory.h"
#include "attention_block.h"
#include "isa.h"
#include "lanes.h"
#include "parallel.h"

namespace moeserve {

namespace {

constexpr int64_t kSegment = 8 * kBlock;           // entries that a thread scores at a time
constexpr int64_t kMostScores = int64_t{1} << 22;  // scores in memory at a time, or those of one row
constexpr int kMostRows = 8;                       // that share packed keys
constexpr int kDigitBits = 11;                     // of the bits of a score
constexpr int kWordBytes = 4;

// A row that does not see all of the entries that it may choose from.
struct Row {
  int64_t token;
  int64_t position;
  int64_t num_seen;
  const int32_t* blocks;
};

void refuse(const std::string& what) { throw std::invalid_argument("choose_entries: " + what); }

// Return the largest number of choices of the rows of a context.
int64_t most_choices(const Indexer& step, int64_t context_len) {
  const int64_t num_entries = std::min(context_len / step.tokens_per_entry, step.top_k);
  if (!step.is_expanded) return num_entries;
  return std::min(num_entries * step.tokens_per_entry + step.tokens_per_entry - 1, context_len);
}

void check_chunk(const Indexer& step, int64_t chunk) {
  const int64_t begin = step.row_starts[chunk], end = step.row_starts[chunk + 1];
  if (begin < 0 || end < begin || end > step.num_tokens) {
    refuse("chunk " + std::to_string(chunk) + " has rows " + std::to_string(begin) + " to " + std::to_string(end) +
           ", but there are " + std::to_string(step.num_tokens) + " tokens");
  }
  const int64_t num_entries = step.context_lens[chunk] / step.tokens_per_entry;
  const int64_t num_unfinished = step.is_expanded && step.context_lens[chunk] % step.tokens_per_entry != 0 ? 1 : 0;
  const int64_t num_blocks = (num_entries + num_unfinished + step.block_size - 1) / step.block_size;
  if (step.context_lens[chunk] < 0 || num_blocks > step.max_blocks) {
    refuse("chunk " + std::to_string(chunk) + " has a context of " + std::to_string(step.context_lens[chunk]) +
           " tokens, but its blocks hold " + std::to_string(step.max_blocks * step.block_size) + " entries");
  }
  if (most_choices(step, step.context_lens[chunk]) > step.num_places) {
    refuse("there are places for " + std::to_string(step.num_places) + " choices, but chunk " + std::to_string(chunk) +
           " has " + std::to_string(num_entries) + " entries");
  }
  for (int64_t b = 0; b < num_blocks; ++b) {
    const int32_t block = step.block_table[chunk * step.max_blocks + b];
    if (block < 0 || block >= step.num_blocks) {
      refuse("chunk " + std::to_string(chunk) + " has block " + std::to_string(block) + ", but there are " +
             std::to_string(step.num_blocks));
    }
  }
}

int32_t slot_of(const Indexer& step, const int32_t* blocks, int64_t entry) {
  return static_cast<int32_t>(blocks[entry / step.block_size] * step.block_size + entry % step.block_size);
}

// Write a chosen entry, or the tokens of it. Return the next place.
int32_t* put_entry(const Indexer& step, const int32_t* blocks, int64_t entry, int32_t* slots) {
  const int32_t slot = slot_of(step, blocks, entry);
  if (!step.is_expanded) {
    *slots = slot;
    return slots + 1;
  }
  const auto num_tokens = static_cast<int32_t>(step.tokens_per_entry);
  for (int32_t token = 0; token < num_tokens; ++token) *slots++ = slot * num_tokens + token;
  return slots;
}

// If entries are expanded, write the tokens up to the last of `num_tokens` that are in no entry yet.
void put_unfinished(const Indexer& step, const int32_t* blocks, int64_t num_tokens, int32_t* slots) {
  if (!step.is_expanded) return;
  const int64_t size = step.block_size * step.tokens_per_entry;
  for (int64_t token = num_tokens - num_tokens % step.tokens_per_entry; token < num_tokens; ++token) {
    *slots++ = static_cast<int32_t>(blocks[token / size] * size + token % size);
  }
}

// Write the counts of all rows, and the entries of rows that get all that they see. Return the other rows.
std::vector<Row> find_rows(const Indexer& step) {
  std::vector<Row> rows;
  std::fill_n(step.counts, step.num_tokens, 0);
  for (int64_t t = 0; t <= step.num_tokens; ++t) step.starts[t] = static_cast<int32_t>(t);
  for (int64_t chunk = 0; chunk < step.num_chunks; ++chunk) {
    const int64_t begin = step.row_starts[chunk], end = step.row_starts[chunk + 1];
    const int32_t* blocks = step.block_table + chunk * step.max_blocks;
    for (int64_t t = begin; t < end; ++t) {
      const int64_t position = step.context_lens[chunk] - end + t;
      if (position < 0) continue;
      const int64_t num_seen = (position + 1) / step.tokens_per_entry;
      int64_t num_chosen = std::min(num_seen, step.top_k);
      if (step.is_expanded) num_chosen = num_chosen * step.tokens_per_entry + (position + 1) % step.tokens_per_entry;
      step.counts[t] = static_cast<int32_t>(num_chosen);
      if (num_seen > step.top_k) {
        rows.push_back({t, position, num_seen, blocks});
        continue;
      }
      int32_t* slots = step.slots + t * step.num_places;
      for (int64_t entry = 0; entry < num_seen; ++entry) slots = put_entry(step, blocks, entry, slots);
      put_unfinished(step, blocks, position + 1, slots);
    }
  }
  return rows;
}

// ---- Scores

// Memory of a thread.
struct Room {
  std::vector<char> queries;
  std::vector<char> packed;
  std::vector<char> zeros;
  std::vector<float> weights;
  std::vector<float> scores;
  std::vector<uint32_t> orders;
};

Room& room_of_thread() {
  thread_local Room room;
  return room;
}

float weight_at(const Indexer& step, int64_t token, int64_t head) {
  const int64_t index = token * step.weight_stride + head;
  if (step.type == ElementType::kBFloat16) return widen(static_cast<const BFloat16*>(step.weights)[index]);
  return static_cast<const float*>(step.weights)[index];
}

// Some consecutive rows of a chunk, which share packed keys.
struct RowGroup {
  const Row* rows;
  float* const* scores;  // of each row's entries, from entry 0 on
  int num_rows;

  int64_t num_seen() const { return rows[num_rows - 1].num_seen; }  // by the last row, which sees the most
};

// Write the scores of a group's entries [first, end), at most kSegment, as far as each row sees them. `first` is a
// multiple of kBlock. A strip of packed keys stays in the L1 cache while the queries of all rows are multiplied with
// it.
void score_entries(const Indexer& step, const BlockKernels& kernels, const RowGroup& group, int64_t first,
                   int64_t end) {
  Room& room = room_of_thread();
  const int head_size = static_cast<int>(step.head_size);
  const int num_heads = static_cast<int>(step.num_heads);
  const int num_queries = group.num_rows * num_heads;
  const int64_t width = element_bytes(step.type);
  const int64_t query_bytes = int64_t{kernels.key_steps(head_size)} * kWordBytes;
  const int num_read = num_queries + kernels.max_queries() - 1;  // tile registers read whole tiles
  auto* queries = aligned(room.queries, num_read * query_bytes);
  auto* packed = aligned(room.packed, kernels.packed_keys_size(head_size) * kWordBytes);
  auto* zeros = aligned(room.zeros, head_size * width);
  auto* weights = aligned(room.weights, num_queries);
  std::memset(zeros, 0, head_size * width);
  for (int query = 0; query < num_queries; ++query) {
    const int64_t token = group.rows[query / num_heads].token, head = query % num_heads;
    const int64_t place = token * step.query_token_stride + head * step.query_head_stride;
    kernels.copy_query(static_cast<const char*>(step.query) + place * width, head_size, queries + query * query_bytes);
    weights[query] = weight_at(step, token, head);
  }
  Tile tile{};
  tile.packed = packed;
  tile.factor = 1.0f;  // which rounds nothing
  tile.scores = aligned(room.scores, int64_t{kernels.max_queries()} * kBlock);
  if (kernels.configure != nullptr) kernels.configure();
  const auto whole_granules = [&](int64_t count) {
    return static_cast<int>((count + kernels.granule - 1) / kernels.granule * kernels.granule);
  };
  const void* blocks[2][kBlock];  // the addresses of the keys at hand and of the next ones
  const auto find_keys = [&](int64_t start, const void** keys) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, end - start));
    for (int p = 0; p < kBlock; ++p) {
      keys[p] = zeros;
      if (p >= count) continue;
      const int64_t slot = slot_of(step, group.rows[0].blocks, start + p);
      keys[p] = static_cast<const char*>(step.key_cache) + slot * head_size * width;
    }
    return count;
  };
  alignas(64) float sums[kBlock];
  int num_next = find_keys(first, blocks[0]);
  for (int64_t start = first, number = 0; start < end; start += kBlock, ++number) {
    const int count = num_next;
    const void** keys = blocks[number % 2];
    const void** next = blocks[1 - number % 2];
    num_next = start + kBlock < end ? find_keys(start + kBlock, next) : 0;
    kernels.pack_keys(keys, {next, {0, num_next}}, {0, whole_granules(count)}, head_size, packed);
    for (int strip = 0; strip < count; strip += kernels.strip_lanes()) {
      for (int row = 0; row < group.num_rows; ++row) {
        const int64_t num_seen = std::min<int64_t>(group.rows[row].num_seen, end) - start - strip;
        if (num_seen <= 0) continue;
        const int64_t num_scores = std::min<int64_t>(num_seen, kernels.strip_lanes());
        tile.range = {strip, strip + whole_granules(num_scores)};
        std::fill(sums + tile.range.begin, sums + tile.range.end, 0.0f);
        const int first_query = row * num_heads, last_query = first_query + num_heads;
        const TileKernels* of_tile = kernels.tiles;
        for (int query = first_query; query < last_query; query += tile.num_queries) {
          const int num_left = last_query - query;
          while (of_tile < kernels.tiles + kernels.num_tiles - 1 && of_tile->num_queries > num_left) ++of_tile;
          tile.num_queries = std::min(of_tile->num_queries, num_left);
          tile.queries = queries + query * query_bytes;
          of_tile->add_positive(tile, head_size, weights + query, sums);
        }
        std::memcpy(group.scores[row] + start + strip, sums + strip, num_scores * sizeof(float));
      }
    }
  }
  if (kernels.release != nullptr) kernels.release();
}

// ---- Choice

// Return an integer that is larger for a larger score. Zeros of both signs are equal.
uint32_t order_of(float score) {
  score += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &score, sizeof(bits));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Return the digit at which the highest entries, counted from the highest digit down, become `missing` or more, and
// reduce `missing` by those with higher digits.
uint32_t find_digit(const int32_t* numbers, uint32_t highest, int64_t& missing) {
  uint32_t value = highest;
  for (; numbers[value] < missing; --value) missing -= numbers[value];
  return value;
}

// Write the slots of the `top_k` highest of a row's scores. The lowest of them is found digit by digit: of the scores
// that begin like it, those with a higher digit are chosen. Few scores begin with its first digit.
void choose(const Indexer& step, const Row& row, const float* scores) {
  constexpr int kFirstShift = 32 - kDigitBits;
  constexpr uint32_t kMask = (1u << kDigitBits) - 1;
  int64_t missing = step.top_k;  // entries to choose among the scores that begin with the known digits
  // Two tables, because neighbours often have the same digit, and a counter cannot be incremented twice at once.
  int32_t numbers[2][1 << kDigitBits] = {};
  for (int64_t entry = 0; entry < row.num_seen; ++entry) ++numbers[entry % 2][order_of(scores[entry]) >> kFirstShift];
  for (uint32_t digit = 0; digit <= kMask; ++digit) numbers[0][digit] += numbers[1][digit];
  const uint32_t first_digit = find_digit(numbers[0], kMask, missing);

  std::vector<uint32_t>& alike = room_of_thread().orders;  // of the scores that begin with the known digits
  alike.resize(numbers[0][first_digit] + 1);               // and a place for the order that is written last
  int64_t num_alike = 0;
  for (int64_t entry = 0; entry < row.num_seen; ++entry) {
    const uint32_t order = order_of(scores[entry]);
    alike[num_alike] = order;
    num_alike += order >> kFirstShift == first_digit;
  }
  uint32_t lowest = first_digit << kFirstShift;
  for (int shift = kFirstShift; shift > 0;) {
    const int bits = std::min(kDigitBits, shift);
    shift -= bits;
    const uint32_t mask = (1u << bits) - 1;
    std::fill_n(numbers[0], mask + 1, 0);
    for (int64_t i = 0; i < num_alike; ++i) ++numbers[0][alike[i] >> shift & mask];
    const uint32_t digit = find_digit(numbers[0], mask, missing);
    lowest |= digit << shift;
    int64_t num_left = 0;
    for (int64_t i = 0; i < num_alike; ++i) {
      alike[num_left] = alike[i];
      num_left += (alike[i] >> shift & mask) == digit;
    }
    num_alike = num_left;
  }
  int32_t* slots = step.slots + row.token * step.num_places;
  for (int64_t entry = 0; entry < row.num_seen; ++entry) {
    const uint32_t order = order_of(scores[entry]);
    if (order < lowest || (order == lowest && missing-- <= 0)) continue;
    slots = put_entry(step, row.blocks, entry, slots);
  }
  put_unfinished(step, row.blocks, row.position + 1, slots);
}

}  // namespace

void choose_entries(const Indexer& step) {
  for (int64_t chunk = 0; chunk < step.num_chunks; ++chunk) check_chunk(step, chunk);
  const std::vector<Row> rows = find_rows(step);
  const BlockKernels& kernels = choose_block_kernels(current_isa(), step.type);
  std::vector<float> memory;
  std::vector<float*> scores;  // of each of the rows at hand
  std::vector<RowGroup> groups;
  std::vector<int64_t> first_segments;  // of each group
  for (size_t begin = 0, end = 0; begin < rows.size(); begin = end) {
    int64_t num_scores = 0;
    while (end < rows.size() && (end == begin || num_scores + rows[end].num_seen <= kMostScores)) {
      num_scores += rows[end++].num_seen;
    }
    memory.resize(num_scores);
    scores.assign(1, memory.data());
    for (size_t index = begin; index < end; ++index) scores.push_back(scores.back() + rows[index].num_seen);
    groups.clear();
    first_segments.assign(1, 0);
    for (size_t index = begin; index < end;) {
      RowGroup group{&rows[index], &scores[index - begin], 0};
      while (index < end && group.num_rows < kMostRows && rows[index].blocks == group.rows[0].blocks) {
        ++group.num_rows;
        ++index;
      }
      groups.push_back(group);
      first_segments.push_back(first_segments.back() + (group.num_seen() + kSegment - 1) / kSegment);
    }
    parallel_for(first_segments.back(), [&](int64_t item) {
      const auto after = std::upper_bound(first_segments.begin(), first_segments.end(), item);
      const int64_t index = after - first_segments.begin() - 1;
      const RowGroup& group = groups[index];
      const int64_t first = (item - first_segments[index]) * kSegment;
      score_entries(step, kernels, group, first, std::min(first + kSegment, group.num_seen()));
    });
    parallel_for(static_cast<int64_t>(end - begin),
                 [&](int64_t index) { choose(step, rows[begin + index], scores[index]); });
  }
}

}  // namespace moeserve
