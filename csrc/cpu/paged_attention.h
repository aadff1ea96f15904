// Attention of rows over a paged KV cache. Plain arrays in and out; knows no Python.

#pragma once

#include <cstdint>

#include "element_type.h"

namespace moeserve {

// One step's attention. T tokens in S chunks of consecutive rows, N query heads, G key-value heads, H head size, V <= H
// value size. Query head n reads key-value head n / (N / G).
struct PagedAttention {
  ElementType type;             // float32 or bfloat16
  const void* query;            // [T, N, H], heads contiguous
  const void* key_cache;        // [num_blocks, G, block_size, H]
  const void* value_cache;      // the same, and may be key_cache itself: a value is the first V elements of its row
  const float* sinks;           // [N]: a score of each query head beside its positions', without a value; or null
  const int32_t* block_table;   // [S, max_blocks]
  const int32_t* row_starts;    // [S + 1]
  const int32_t* context_lens;  // [S]
  void* out;                    // [T, N, V]
  int64_t query_token_stride;   // in elements
  int64_t query_head_stride;
  int64_t num_tokens;
  int64_t num_chunks;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_size;
  int64_t value_size;
  int64_t num_blocks;
  int64_t block_size;
  int64_t max_blocks;
  float scale;
  int64_t window;  // a row attends to that many positions at most, its own included; 0: to all up to its own
};

// Fills `out`. Row i of a chunk with R rows and context length C is at position C - R + i and attends to the positions
// up to it. Rows of no chunk, and rows with a negative position, get zeros.
//
// A row's result is the same to the last bit alone and in any batch, however its request is cut into chunks, with any
// number of threads, and with any block size: it depends on the row's query, keys and values, on the sinks, on the
// group size N / G, and on the instruction set.
//
// Scores, weights and sums are float32. With bfloat16 elements and an instruction set that multiplies these, a weight
// is rounded to bfloat16 before it is multiplied with a value, and the weights that are added up are the rounded ones.
//
// Throws std::invalid_argument, before it reads or writes anything, for rows or blocks that are out of range.
void paged_attention(const PagedAttention& step);

}  // namespace moeserve
