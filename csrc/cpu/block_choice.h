// The indexer of block-sparse attention: each row chooses the blocks of its context that it attends to. See
// moeserve/ops/block_sparse/interface.py for the formula.

#pragma once

#include <cstdint>

#include "element_type.h"

namespace moeserve {

// T tokens in S chunks of consecutive rows, N heads of the indexer, H size of its keys, P pairs of an indexer's head
// and a key-value head, of which there are G; U pieces of the chosen blocks of a row.
//
// A piece is `piece_size` positions of one key-value head in the cache of keys and values [num_blocks, G, block_size]:
// the largest number that divides `block_size` and `chosen_size`.
struct BlockChoice {
  ElementType type;             // float32 or bfloat16
  const void* query;            // [T, N, H], heads contiguous
  const void* key_cache;        // [num_blocks, block_size, H]
  const int32_t* block_table;   // [S, max_blocks]
  const int32_t* row_starts;    // [S + 1]
  const int32_t* context_lens;  // [S]
  int32_t* pieces;              // [T, P, U]: the pieces of the chosen blocks, ascending by position
  int32_t* counts;              // [T, P]: the number of positions in the chosen blocks
  int32_t* starts;              // [T * P + 1]: the numbers from 0 up
  int64_t query_token_stride;   // in elements
  int64_t query_head_stride;
  int64_t num_tokens;
  int64_t num_chunks;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t num_pairs;  // the larger of N and G, of which one divides the other
  int64_t head_size;
  int64_t num_blocks;
  int64_t block_size;  // positions in a block of the caches
  int64_t max_blocks;
  int64_t max_pieces;   // U
  int64_t chosen_size;  // positions in a block that rows choose
  int64_t piece_size;
  int64_t top_k;      // blocks of a row and head
  int64_t num_local;  // blocks up to that of the row which are always chosen; at most top_k
};

// Fill pieces, counts and starts. A row that sees up to `top_k` blocks gets all of them; otherwise the last `num_local`
// and those with the highest scores, the lower position first among equals. Rows outside of all chunks, or before
// position 0, get none.
//
// The choice of a row depends on its query and the keys that it sees, and on the instruction set.
//
// Throws std::invalid_argument for rows or blocks out of range, before anything is written.
void choose_blocks(const BlockChoice& step);

}  // namespace moeserve
