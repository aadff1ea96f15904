// The lightning indexer: each row chooses the entries of its context that it attends to. See
// moeserve/ops/indexer/interface.py for the formula.

#pragma once

#include <cstdint>

#include "element_type.h"

namespace moeserve {

// T tokens in S chunks of consecutive rows, N heads, H head size, C places for the entries of a row.
struct Indexer {
  ElementType type;             // float32 or bfloat16
  const void* query;            // [T, N, H], heads contiguous
  const void* weights;          // [T, N], rows contiguous
  const void* key_cache;        // [num_blocks, block_size, H]
  const int32_t* block_table;   // [S, max_blocks]
  const int32_t* row_starts;    // [S + 1]
  const int32_t* context_lens;  // [S], in tokens
  int32_t* slots;               // [T, C]: block * block_size + offset of each choice, ascending by position
  int32_t* counts;              // [T]: the number of choices of each row
  int32_t* starts;              // [T + 1]: the numbers from 0 up
  int64_t query_token_stride;   // in elements
  int64_t query_head_stride;
  int64_t weight_stride;  // of rows
  int64_t num_tokens;
  int64_t num_chunks;
  int64_t num_heads;
  int64_t head_size;
  int64_t num_blocks;
  int64_t block_size;  // entries
  int64_t max_blocks;
  int64_t num_places;  // C
  int64_t top_k;
  int64_t tokens_per_entry;  // a row at position p sees the first (p + 1) / tokens_per_entry entries
  bool is_expanded;          // choices are the tokens of the chosen entries and those in no entry yet, not the entries
};

// Fill slots, counts and starts. A row with up to `top_k` visible entries gets all of them; otherwise those with the
// highest scores, the lower position first among equals. Rows outside of all chunks, or before position 0, get none.
//
// The choice of a row depends on its query, its weights and the keys that it sees, and on the instruction set.
//
// Throws std::invalid_argument for rows or blocks out of range, before anything is written.
void choose_entries(const Indexer& step);

}  // namespace moeserve
