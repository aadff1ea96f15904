// Copies each head of each token to its slot on the calling thread: a step writes few bytes.

#include "cache_write.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace moeserve {

void write_cache(const CacheWrite& step) {
  const int64_t num_slots = step.num_blocks * step.block_size;
  for (int64_t t = 0; t < step.num_tokens; ++t) {
    if (step.slots[t] < -1 || step.slots[t] >= num_slots) {
      throw std::invalid_argument("write_cache: token " + std::to_string(t) + " has slot " +
                                  std::to_string(step.slots[t]) + ", but there are " + std::to_string(num_slots));
    }
  }
  const auto* keys = static_cast<const char*>(step.key);
  const auto* values = static_cast<const char*>(step.value);
  auto* key_cache = static_cast<char*>(step.key_cache);
  auto* value_cache = static_cast<char*>(step.value_cache);
  const int64_t head_bytes = step.head_size * step.element_bytes;
  for (int64_t t = 0; t < step.num_tokens; ++t) {
    if (step.slots[t] < 0) continue;
    const int64_t block = step.slots[t] / step.block_size;
    const int64_t in_block = step.slots[t] % step.block_size;
    for (int64_t g = 0; g < step.num_kv_heads; ++g) {
      const int64_t target = ((block * step.num_kv_heads + g) * step.block_size + in_block) * head_bytes;
      const int64_t key = (t * step.key_token_stride + g * step.key_head_stride) * step.element_bytes;
      std::memcpy(key_cache + target, keys + key, head_bytes);
      if (values == nullptr) continue;
      const int64_t value = (t * step.value_token_stride + g * step.value_head_stride) * step.element_bytes;
      std::memcpy(value_cache + target, values + value, head_bytes);
    }
  }
}

}  // namespace moeserve
