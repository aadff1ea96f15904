// Writes of keys and values to a paged KV cache.

#pragma once

#include <cstdint>

namespace moeserve {

// The keys and values of one step and their slots. `element_bytes` supports every type.
struct CacheWrite {
  int64_t element_bytes;
  const void* key;       // [T, G, H]: heads are contiguous; strides of tokens and heads are in elements
  const void* value;     // [T, G, H], with its own strides; null without values
  void* key_cache;       // [num_blocks, G, block_size, H]
  void* value_cache;     // [num_blocks, G, block_size, H]; null without values
  const int64_t* slots;  // [T]: block * block_size + offset, or -1 to skip the token
  int64_t num_tokens;
  int64_t num_kv_heads;
  int64_t head_size;
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
