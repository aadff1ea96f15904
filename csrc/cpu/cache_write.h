// Writing keys and values into a paged KV cache. Plain arrays in and out; knows no Python.

#pragma once

#include <cstdint>

namespace moeserve {

// Where the keys and values of one step go. `element_bytes` covers every type.
struct CacheWrite {
  int64_t element_bytes;
  const void* key;       // [T, G, H]: a head is contiguous, tokens and heads lie `..._stride` elements apart
  const void* value;     // the same, with strides of its own; null where there are keys alone
  void* key_cache;       // [num_blocks, G, block_size, H]
  void* value_cache;     // the same; null where there are keys alone
  const int64_t* slots;  // [T]: block * block_size + offset, or -1 for a token that is not kept
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

// Throws std::invalid_argument, before it writes anything, for a slot that is out of range.
void write_cache(const CacheWrite& step);

}  // namespace moeserve
