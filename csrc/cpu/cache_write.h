// Writes of keys and values to a paged KV cache.

#pragma once

#include <cstdint>

#include "element_type.h"
#include "vectors.h"

namespace moeserve {

// The keys and values of one step and their slots.
struct CacheWrite {
  ElementType type;        // of keys and values: any type, but with scales only float32 or bfloat16
  const void* key;         // [T, G, H]: heads are contiguous; strides of tokens and heads are in elements
  const void* value;       // [T, G, V], with its own strides; null without values
  void* key_cache;         // [num_blocks, G, block_size, H]: the elements, or codes if there are scales
  void* value_cache;       // [num_blocks, G, block_size, V]; null without values
  BFloat16* key_scales;    // [num_blocks, G, block_size], or null (float8_rows.h)
  BFloat16* value_scales;  // the same
  const int64_t* slots;    // [T]: block * block_size + offset, or -1 to skip the token
  int64_t num_tokens;
  int64_t num_kv_heads;
  int64_t head_size;   // H
  int64_t value_size;  // V
  int64_t num_blocks;
  int64_t block_size;
  int64_t key_token_stride;
  int64_t key_head_stride;
  int64_t value_token_stride;
  int64_t value_head_stride;
};

// Throws std::invalid_argument for a slot out of range, before anything is written.
void write_cache(const CacheWrite& step);

}  // namespace moeserve
