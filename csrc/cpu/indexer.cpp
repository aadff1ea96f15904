// Scores of the entries that a row sees, and the choice of the highest.
//
// A row's heads are the queries of a tile of attention: packed keys serve all of them. Scores of long contexts are
// computed by several threads, and the entries of each row are chosen by one.

#include "indexer.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention_block.h"
#include "isa.h"
#include "lanes.h"
#include "parallel.h"

namespace moeserve {

namespace {

constexpr int64_t kSegment = 8 * kBlock;           // entries that a thread scores at a time
constexpr int64_t kMostScores = int64_t{1} << 22;  // scores in memory at a time, or those of one row
constexpr int kDigits = 3;                         // of the bits of a score
constexpr int kDigitBits = 11;
constexpr int kWordBytes = 4;

// A row that does not see all of the entries that it may choose from.
struct Row {
  int64_t token;
  int64_t num_seen;
  const int32_t* blocks;
};

void refuse(const std::string& what) { throw std::invalid_argument("choose_entries: " + what); }

void check_chunk(const Indexer& step, int64_t chunk) {
  const int64_t begin = step.row_starts[chunk], end = step.row_starts[chunk + 1];
  if (begin < 0 || end < begin || end > step.num_tokens) {
    refuse("chunk " + std::to_string(chunk) + " has rows " + std::to_string(begin) + " to " + std::to_string(end) +
           ", but there are " + std::to_string(step.num_tokens) + " tokens");
  }
  const int64_t num_entries = step.context_lens[chunk] / step.tokens_per_entry;
  const int64_t num_blocks = (num_entries + step.block_size - 1) / step.block_size;
  if (step.context_lens[chunk] < 0 || num_blocks > step.max_blocks) {
    refuse("chunk " + std::to_string(chunk) + " has a context of " + std::to_string(step.context_lens[chunk]) +
           " tokens, but its blocks hold " + std::to_string(step.max_blocks * step.block_size) + " entries");
  }
  if (num_entries > step.num_places && step.num_places < step.top_k) {
    refuse("there are places for " + std::to_string(step.num_places) + " entries, but chunk " + std::to_string(chunk) +
           " has " + std::to_string(num_entries));
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
      step.counts[t] = static_cast<int32_t>(std::min(num_seen, step.top_k));
      if (num_seen > step.top_k) {
        rows.push_back({t, num_seen, blocks});
        continue;
      }
      int32_t* slots = step.slots + t * step.num_places;
      for (int64_t entry = 0; entry < num_seen; ++entry) slots[entry] = slot_of(step, blocks, entry);
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

  template <typename Number>
  static Number* at_least(std::vector<Number>& memory, int64_t count) {
    constexpr int64_t kPadding = 64 / sizeof(Number);
    if (static_cast<int64_t>(memory.size()) < count + kPadding) memory.resize(count + kPadding);
    const auto address = reinterpret_cast<uintptr_t>(memory.data());
    return reinterpret_cast<Number*>((address + 63) / 64 * 64);
  }
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

// Write the scores of a row's entries [first, end), at most kSegment, to `scores`. `first` is a multiple of kBlock.
void score_entries(const Indexer& step, const BlockKernels& kernels, const Row& row, int64_t first, int64_t end,
                   float* scores) {
  Room& room = room_of_thread();
  const int head_size = static_cast<int>(step.head_size);
  const int num_heads = static_cast<int>(step.num_heads);
  const int64_t width = element_bytes(step.type);
  const int64_t query_bytes = int64_t{kernels.key_steps(head_size)} * kWordBytes;
  const int num_read = num_heads + kernels.max_queries() - 1;  // tile registers read whole tiles
  auto* queries = Room::at_least(room.queries, num_read * query_bytes);
  auto* packed = Room::at_least(room.packed, kernels.packed_keys_size(head_size) * kWordBytes);
  auto* zeros = Room::at_least(room.zeros, head_size * width);
  auto* weights = Room::at_least(room.weights, num_heads);
  std::memset(zeros, 0, head_size * width);
  for (int head = 0; head < num_heads; ++head) {
    const int64_t place = row.token * step.query_token_stride + head * step.query_head_stride;
    kernels.copy_query(static_cast<const char*>(step.query) + place * width, head_size, queries + head * query_bytes);
    weights[head] = weight_at(step, row.token, head);
  }
  Tile tile{};
  tile.packed = packed;
  tile.factor = 1.0f;  // which rounds nothing
  tile.scores = Room::at_least(room.scores, int64_t{kernels.max_queries()} * kBlock);
  if (kernels.configure != nullptr) kernels.configure();
  const void* keys[kBlock];
  alignas(64) float sums[kBlock];
  for (int64_t start = first; start < end; start += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, end - start));
    for (int p = 0; p < kBlock; ++p) {
      keys[p] = zeros;
      if (p >= count) continue;
      const int64_t slot = slot_of(step, row.blocks, start + p);
      keys[p] = static_cast<const char*>(step.key_cache) + slot * head_size * width;
    }
    tile.range = {0, (count + kernels.granule - 1) / kernels.granule * kernels.granule};
    kernels.pack_keys(keys, {}, tile.range, head_size, packed);
    std::fill_n(sums, kBlock, 0.0f);
    const TileKernels* of_tile = kernels.tiles;
    for (int head = 0; head < num_heads; head += tile.num_queries) {
      while (of_tile < kernels.tiles + kernels.num_tiles - 1 && of_tile->num_queries > num_heads - head) ++of_tile;
      tile.num_queries = std::min(of_tile->num_queries, num_heads - head);
      tile.queries = queries + head * query_bytes;
      of_tile->add_positive(tile, head_size, weights + head, sums);
    }
    std::memcpy(scores + start - first, sums, count * sizeof(float));
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

// Write the slots of the `top_k` highest of a row's scores. The lowest of them is found digit by digit: of the scores
// that begin like it, those with a higher digit are chosen.
void choose(const Indexer& step, const Row& row, const float* scores) {
  uint32_t lowest = 0;           // the digits that are known
  int64_t missing = step.top_k;  // entries to choose among the scores that begin with them
  for (int digit = 0, shift = 32 - kDigitBits; digit < kDigits; ++digit, shift = std::max(0, shift - kDigitBits)) {
    int64_t numbers[1 << kDigitBits] = {};
    const int bits = digit == kDigits - 1 ? 32 - 2 * kDigitBits : kDigitBits;
    const uint32_t digit_mask = (1u << bits) - 1;
    for (int64_t entry = 0; entry < row.num_seen; ++entry) {
      const uint32_t order = order_of(scores[entry]);
      const bool begins_alike = digit == 0 || (order ^ lowest) >> (shift + bits) == 0;
      numbers[order >> shift & digit_mask] += begins_alike;
    }
    uint32_t value = digit_mask;
    for (; numbers[value] < missing; --value) missing -= numbers[value];
    lowest |= value << shift;
  }
  int32_t* slots = step.slots + row.token * step.num_places;
  for (int64_t entry = 0; entry < row.num_seen; ++entry) {
    const uint32_t order = order_of(scores[entry]);
    if (order < lowest || (order == lowest && missing-- <= 0)) continue;
    *slots++ = slot_of(step, row.blocks, entry);
  }
}

}  // namespace

void choose_entries(const Indexer& step) {
  for (int64_t chunk = 0; chunk < step.num_chunks; ++chunk) check_chunk(step, chunk);
  const std::vector<Row> rows = find_rows(step);
  const BlockKernels& kernels = choose_block_kernels(current_isa(), step.type);
  std::vector<float> scores;
  std::vector<int64_t> first_scores, first_segments;  // of the rows at hand
  for (size_t begin = 0, end = 0; begin < rows.size(); begin = end) {
    first_scores.assign(1, 0);
    first_segments.assign(1, 0);
    while (end < rows.size() && (end == begin || first_scores.back() + rows[end].num_seen <= kMostScores)) {
      first_scores.push_back(first_scores.back() + rows[end].num_seen);
      first_segments.push_back(first_segments.back() + (rows[end].num_seen + kSegment - 1) / kSegment);
      ++end;
    }
    scores.resize(first_scores.back());
    parallel_for(first_segments.back(), [&](int64_t item) {
      const auto after = std::upper_bound(first_segments.begin(), first_segments.end(), item);
      const int64_t index = after - first_segments.begin() - 1;
      const Row& row = rows[begin + index];
      const int64_t first = (item - first_segments[index]) * kSegment;
      const int64_t last = std::min(first + kSegment, row.num_seen);
      score_entries(step, kernels, row, first, last, scores.data() + first_scores[index] + first);
    });
    parallel_for(static_cast<int64_t>(end - begin),
                 [&](int64_t index) { choose(step, rows[begin + index], scores.data() + first_scores[index]); });
  }
}

}  // namespace moeserve
