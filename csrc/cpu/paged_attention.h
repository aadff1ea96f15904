// Attention of rows over a paged KV cache.

#pragma once

#include <cstdint>

#include "element_type.h"
#include "vectors.h"

namespace moeserve {

// The attention of one step. T tokens in S chunks of consecutive rows, N query heads, G key-value heads, H head size, V
// <= H value size. Query head n reads key-value head n / (N / G).
struct PagedAttention {
  ElementType type;            // float32 or bfloat16
  const void* query;           // [T, N, H], heads contiguous
  const void* key_cache;       // [num_blocks, G, block_size, H]
  const void* value_cache;     // [num_blocks, G, block_size, V], or key_cache: a value is the first V elements of a key
  const BFloat16* key_scales;  // [num_blocks, G, block_size], or null: the caches have 8-bit floats (float8_rows.h)
  const BFloat16* value_scales;
  const float* sinks;           // [N], [T, N] or null: an additional score of each query head, without a value
  const void* biases;           // [T, N, num_distances] or null: added to scores, by the distance of the position
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
  int64_t whole_group_size;  // query heads of all ranks that read one key-value head; N / G or more
  int64_t head_size;
  int64_t value_size;
  int64_t num_blocks;
  int64_t block_size;
  int64_t max_blocks;
  float scale;
  // The maximum number of positions that a row attends to, including its own; 0: no limit. If negative, positions are
  // divided into chunks of -window, and a row attends only to its own chunk.
  int64_t window;
  int64_t num_distances;  // of biases; positions further away have none
  bool has_token_sinks;   // `sinks` is [T, N]
};

// Fill `out`. Row i of a chunk with R rows and context length C is at position C - R + i, and attends to the positions
// up to its own. Rows outside of all chunks, and rows with a negative position, get zeros.
//
// The bytes of a row depend on its query, keys and values, on the sinks and biases, on `whole_group_size` and on the
// instruction set. They do not depend on the batch, on the division of the request into chunks, on the number of
// threads, on the block size, or on the heads of this rank.
//
// Scores, weights and sums are float32. With bfloat16 elements and AVX-512 BF16 or AMX, weights are rounded to bfloat16
// before they are multiplied with values, and the rounded weights are summed.
//
// 8-bit floats are converted to the element type, which is exact, and then treated like other elements.
//
// Throws std::invalid_argument for rows or blocks out of range, before anything is read or written.
void paged_attention(const PagedAttention& step);

}  // namespace moeserve
