// Scores of the blocks that a row sees, and the choice of the highest.
//
// The heads of a row are the queries of a tile of attention. Packed keys serve all heads of some consecutive rows.
// Scores of long contexts are computed by several threads, and the blocks of each row are chosen by one.

#include "block_choice.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
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

constexpr int64_t kSegment = 8 * kBlock;           // positions that a thread scores at a time, or a few more
constexpr int64_t kMostScores = int64_t{1} << 20;  // scores in memory at a time, or those of one row
constexpr int kMostRows = 8;                       // that share packed keys
constexpr int kWordBytes = 4;

// A row that does not see all of the blocks that it may choose from.
struct Row {
  int64_t token;
  int64_t position;
  const int32_t* blocks;
};

// Some consecutive rows of a chunk, which share packed keys.
struct RowGroup {
  const Row* rows;
  float* const* scores;  // of each row: [N, blocks]
  int num_rows;

  int64_t num_seen() const { return rows[num_rows - 1].position + 1; }  // by the last row, which sees the most
};

void refuse(const std::string& what) { throw std::invalid_argument("choose_blocks: " + what); }

int64_t num_chosen_from(const BlockChoice& step, int64_t position) { return position / step.chosen_size + 1; }

void check_chunk(const BlockChoice& step, int64_t chunk) {
  const int64_t begin = step.row_starts[chunk], end = step.row_starts[chunk + 1], length = step.context_lens[chunk];
  if (begin < 0 || end < begin || end > step.num_tokens) {
    refuse("chunk " + std::to_string(chunk) + " has rows " + std::to_string(begin) + " to " + std::to_string(end) +
           ", but there are " + std::to_string(step.num_tokens) + " tokens");
  }
  const int64_t num_blocks = (length + step.block_size - 1) / step.block_size;
  if (length < 0 || num_blocks > step.max_blocks) {
    refuse("chunk " + std::to_string(chunk) + " has a context of " + std::to_string(length) +
           " tokens, but its blocks hold " + std::to_string(step.max_blocks * step.block_size));
  }
  const int64_t most = std::min(step.top_k * step.chosen_size, length);
  if ((most + step.piece_size - 1) / step.piece_size > step.max_pieces) {
    refuse("there is room for " + std::to_string(step.max_pieces) + " pieces, but chunk " + std::to_string(chunk) +
           " needs up to " + std::to_string(most) + " positions");
  }
  for (int64_t b = 0; b < num_blocks; ++b) {
    const int32_t block = step.block_table[chunk * step.max_blocks + b];
    if (block < 0 || block >= step.num_blocks) {
      refuse("chunk " + std::to_string(chunk) + " has block " + std::to_string(block) + ", but there are " +
             std::to_string(step.num_blocks));
    }
  }
}

// Write the pieces of a row's chosen blocks, ascending, for all pairs of an indexer's head.
void write_pieces(const BlockChoice& step, const Row& row, int64_t head, const int64_t* chosen, int64_t num_chosen) {
  const int64_t pieces_per_block = step.block_size / step.piece_size;
  const int64_t pairs_per_head = step.num_pairs / step.num_heads;
  const int64_t pairs_per_kv_head = step.num_pairs / step.num_kv_heads;
  for (int64_t pair = head * pairs_per_head; pair < (head + 1) * pairs_per_head; ++pair) {
    const int64_t kv_head = pair / pairs_per_kv_head, place = row.token * step.num_pairs + pair;
    int32_t* piece = step.pieces + place * step.max_pieces;
    int64_t count = 0;
    for (int64_t i = 0; i < num_chosen; ++i) {
      const int64_t end = std::min((chosen[i] + 1) * step.chosen_size, row.position + 1);
      for (int64_t p = chosen[i] * step.chosen_size; p < end; p += step.piece_size) {
        const int64_t block = int64_t{row.blocks[p / step.block_size]} * step.num_kv_heads + kv_head;
        *piece++ = static_cast<int32_t>(block * pieces_per_block + p % step.block_size / step.piece_size);
      }
      count += end - chosen[i] * step.chosen_size;
    }
    step.counts[place] = static_cast<int32_t>(count);
  }
}

// Write the pieces of rows that get all blocks that they see, and no positions for others. Return the other rows.
std::vector<Row> find_rows(const BlockChoice& step) {
  std::vector<Row> rows;
  std::vector<int64_t> all(step.top_k);
  std::iota(all.begin(), all.end(), 0);
  std::fill_n(step.counts, step.num_tokens * step.num_pairs, 0);
  std::iota(step.starts, step.starts + step.num_tokens * step.num_pairs + 1, 0);
  for (int64_t chunk = 0; chunk < step.num_chunks; ++chunk) {
    const int64_t begin = step.row_starts[chunk], end = step.row_starts[chunk + 1];
    for (int64_t t = begin; t < end; ++t) {
      const Row row{t, step.context_lens[chunk] - end + t, step.block_table + chunk * step.max_blocks};
      if (row.position < 0) continue;
      const int64_t num_seen = num_chosen_from(step, row.position);
      if (num_seen > step.top_k) {
        rows.push_back(row);
        continue;
      }
      for (int64_t head = 0; head < step.num_heads; ++head) write_pieces(step, row, head, all.data(), num_seen);
    }
  }
  return rows;
}

// Memory of a thread.
struct Room {
  std::vector<char> queries;
  std::vector<char> packed;
  std::vector<char> zeros;
  std::vector<float> scores;
};

Room& room_of_thread() {
  thread_local Room room;
  return room;
}

float largest_of(const float* scores, int64_t count) {
  constexpr int kParts = 16;
  float largest[kParts];
  std::fill_n(largest, kParts, -std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + kParts <= count; i += kParts) {
    for (int part = 0; part < kParts; ++part) {
      largest[part] = scores[i + part] > largest[part] ? scores[i + part] : largest[part];
    }
  }
  for (; i < count; ++i) largest[0] = std::max(largest[0], scores[i]);
  return *std::max_element(largest, largest + kParts);
}

// Raise the scores of the blocks to those of `count` positions from `start` on.
void raise_scores(const BlockChoice& step, const float* of_positions, int64_t start, int64_t count, float* of_blocks) {
  for (int64_t begin = 0; begin < count;) {
    const int64_t block = (start + begin) / step.chosen_size;
    const int64_t end = std::min((block + 1) * step.chosen_size - start, count);
    of_blocks[block] = std::max(of_blocks[block], largest_of(of_positions + begin, end - begin));
    begin = end;
  }
}

// Raise the scores of a group's blocks to those of the positions [first, end), as far as each row sees them. A strip of
// packed keys stays in the L1 cache while the queries of all rows are multiplied with it.
void score_positions(const BlockChoice& step, const BlockKernels& kernels, const RowGroup& group, int64_t first,
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
  std::memset(zeros, 0, head_size * width);
  for (int query = 0; query < num_queries; ++query) {
    const int64_t token = group.rows[query / num_heads].token, head = query % num_heads;
    const int64_t place = token * step.query_token_stride + head * step.query_head_stride;
    kernels.copy_query(static_cast<const char*>(step.query) + place * width, head_size, queries + query * query_bytes);
  }
  Tile tile{};
  tile.packed = packed;
  tile.factor = 1.0f;  // which rounds nothing
  tile.scores = aligned(room.scores, int64_t{kernels.max_queries()} * kBlock);
  if (kernels.configure != nullptr) kernels.configure();
  const auto whole_granules = [&](int64_t count) {
    return static_cast<int>((count + kernels.granule - 1) / kernels.granule * kernels.granule);
  };
  const void* keys[2][kBlock];  // the addresses of the keys at hand and of the next ones
  const auto find_keys = [&](int64_t start, const void** found) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, end - start));
    for (int p = 0; p < kBlock; ++p) {
      found[p] = zeros;
      if (p >= count) continue;
      const int64_t position = start + p;
      const int64_t block = group.rows[0].blocks[position / step.block_size];
      const int64_t slot = block * step.block_size + position % step.block_size;
      found[p] = static_cast<const char*>(step.key_cache) + slot * head_size * width;
    }
    return count;
  };
  int num_next = find_keys(first, keys[0]);
  for (int64_t start = first, number = 0; start < end; start += kBlock, ++number) {
    const int count = num_next;
    const void** next = keys[1 - number % 2];
    num_next = start + kBlock < end ? find_keys(start + kBlock, next) : 0;
    kernels.pack_keys(keys[number % 2], {next, {0, num_next}}, {0, whole_granules(count)}, head_size, packed);
    for (int strip = 0; strip < count; strip += kernels.strip_lanes()) {
      for (int row = 0; row < group.num_rows; ++row) {
        const int64_t num_blocks = num_chosen_from(step, group.rows[row].position);
        const int64_t num_seen = std::min(group.rows[row].position + 1, end) - start - strip;
        if (num_seen <= 0) continue;
        const int64_t num_scores = std::min<int64_t>(num_seen, kernels.strip_lanes());
        tile.range = {strip, strip + whole_granules(num_scores)};
        const TileKernels* of_tile = kernels.tiles;
        for (int head = 0; head < num_heads; head += tile.num_queries) {
          const int num_left = num_heads - head;
          while (of_tile < kernels.tiles + kernels.num_tiles - 1 && of_tile->num_queries > num_left) ++of_tile;
          tile.num_queries = std::min(of_tile->num_queries, num_left);
          tile.queries = queries + (row * num_heads + head) * query_bytes;
          of_tile->score(tile, head_size);
          for (int query = 0; query < tile.num_queries; ++query) {
            raise_scores(step, tile.scores + query * kBlock + strip, start + strip, num_scores,
                         group.scores[row] + (head + query) * num_blocks);
          }
        }
      }
    }
  }
  if (kernels.release != nullptr) kernels.release();
}

// Write the pieces of the blocks with the highest of a row's scores.
void choose(const BlockChoice& step, const Row& row, float* scores) {
  const int64_t num_blocks = num_chosen_from(step, row.position);
  std::vector<int64_t> order(num_blocks);
  for (int64_t head = 0; head < step.num_heads; ++head, scores += num_blocks) {
    std::fill(scores + num_blocks - step.num_local, scores + num_blocks, std::numeric_limits<float>::infinity());
    std::iota(order.begin(), order.end(), 0);
    const auto is_before = [&](int64_t a, int64_t b) {
      return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
    };
    std::nth_element(order.begin(), order.begin() + step.top_k, order.end(), is_before);
    std::sort(order.begin(), order.begin() + step.top_k);
    write_pieces(step, row, head, order.data(), step.top_k);
  }
}

}  // namespace

void choose_blocks(const BlockChoice& step) {
  for (int64_t chunk = 0; chunk < step.num_chunks; ++chunk) check_chunk(step, chunk);
  const std::vector<Row> rows = find_rows(step);
  const BlockKernels& kernels = choose_block_kernels(current_isa(), step.type);
  // Threads score whole blocks, so that none of them is scored by two.
  const int64_t unit = std::lcm(step.chosen_size, int64_t{kBlock});
  const int64_t segment = (kSegment + unit - 1) / unit * unit;
  std::vector<float> memory;
  std::vector<float*> scores;  // of each of the rows at hand
  std::vector<RowGroup> groups;
  std::vector<int64_t> first_segments;  // of each group
  for (size_t begin = 0, end = 0; begin < rows.size(); begin = end) {
    const auto num_scores_of = [&](const Row& row) { return step.num_heads * num_chosen_from(step, row.position); };
    int64_t num_scores = 0;
    while (end < rows.size() && (end == begin || num_scores + num_scores_of(rows[end]) <= kMostScores)) {
      num_scores += num_scores_of(rows[end++]);
    }
    memory.assign(num_scores, -std::numeric_limits<float>::infinity());
    scores.clear();
    float* next = memory.data();
    for (size_t index = begin; index < end; ++index) {
      scores.push_back(next);
      next += num_scores_of(rows[index]);
    }
    groups.clear();
    first_segments.assign(1, 0);
    for (size_t index = begin; index < end;) {
      RowGroup group{&rows[index], &scores[index - begin], 0};
      while (index < end && group.num_rows < kMostRows && rows[index].blocks == group.rows[0].blocks) {
        ++group.num_rows;
        ++index;
      }
      groups.push_back(group);
      first_segments.push_back(first_segments.back() + (group.num_seen() + segment - 1) / segment);
    }
    parallel_for(first_segments.back(), [&](int64_t item) {
      const auto after = std::upper_bound(first_segments.begin(), first_segments.end(), item);
      const int64_t index = after - first_segments.begin() - 1;
      const int64_t first = (item - first_segments[index]) * segment;
      score_positions(step, kernels, groups[index], first, std::min(first + segment, groups[index].num_seen()));
    });
    parallel_for(static_cast<int64_t>(end - begin),
                 [&](int64_t index) { choose(step, rows[begin + index], scores[index]); });
  }
}

}  // namespace moeserve
