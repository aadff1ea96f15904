// Entries of windows of tokens, and the vectors that a row attends to. See
// moeserve/ops/compressed_attention/interface.py.

#pragma once

#include <cstdint>

#include "element_type.h"

namespace moeserve {

// T tokens in S chunks of consecutive rows. Row i of a chunk with R rows and context length C is at position C - R + i;
// rows with a negative position belong to no request.
struct ChunksOfRequests {
  const int64_t* slots;         // [T]: block * block_size + offset of each token; negative: nothing is stored
  const int32_t* block_table;   // [S, max_blocks]
  const int32_t* row_starts;    // [S + 1]
  const int32_t* context_lens;  // [S]
  int64_t num_tokens;
  int64_t num_chunks;
  int64_t max_blocks;
  int64_t num_blocks;
  int64_t block_size;
};

// Windows of m tokens, series of H values each.
struct WindowPooling {
  ElementType type;       // of the projection and of the result: float32 or bfloat16
  const void* projected;  // [T, 2 * series * H]: values of each series, then gates
  int64_t row_stride;     // of the projection
  const float* bias;      // [m, series * H]
  float* tails;           // [num_blocks, series * 3 * H]
  void* out;              // [T, H]: in the row of the last token of a window; zeros in other rows
  int64_t ratio;          // m
  int64_t num_series;     // 1 or 2
  int64_t size;           // H
  // [S]: the last rows of each chunk, fewer than all, after which no tail is kept; null: none
  const int32_t* num_drafts;
  ChunksOfRequests chunks;
};

// The vectors that rows attend to: of tokens in blocks of their own, and behind them of entries.
struct VectorLists {
  const int32_t* window_table;  // [S, max_blocks]: blocks of tokens; any number behind the window
  int64_t num_window_blocks;
  int64_t window;
  int64_t ratio;                 // tokens of an entry; 0: there are no entries
  int64_t entries_of_block;      // places for entries
  const int32_t* chosen;         // [T, C]: slots of entries, or null: all entries
  const int32_t* chosen_counts;  // [T]
  int64_t num_places;            // C
  int32_t* listed;               // [T, L]
  int32_t* counts;               // [T]
  int32_t* starts;               // [T + 1]
  int64_t num_listed;            // L
};

// All of them throw std::invalid_argument for rows or blocks out of range, before anything is written.

// Update tails, and write the pooled values of each window. All arithmetic is float32. The bytes of a token's result
// depend only on its request's tokens up to it and on the shapes. No two chunks may have the same block.
void pool_windows(const WindowPooling& pooling);

// Write the slot of the entry of each window in the row of its last token, and -1 in other rows.
void find_entry_slots(const ChunksOfRequests& chunks, int64_t ratio, int64_t entries_of_block, int64_t* slots);

// Write the vectors of the window of each row in the order of their positions, then those of its entries, their
// numbers, and the numbers from 0 up: the block table of a step in which each vector is a block and each row a chunk.
void list_vectors(const ChunksOfRequests& chunks, const VectorLists& lists);

}  // namespace moeserve
