// Copies each head of each token to its slot, or writes its codes if the cache has 8-bit floats.

#include "cache_write.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "float8_rows.h"
#include "isa.h"

namespace moeserve {

namespace {

// Call write(index of the row in the caches, key, value) for each head of each token with a slot. `key` and `value` are
// indices of elements.
template <typename Write>
MOESERVE_INLINE void for_heads(const CacheWrite& step, int64_t first, int64_t last, const Write& write) {
  for (int64_t t = first; t < last; ++t) {
    if (step.slots[t] < 0) continue;
    const int64_t block = step.slots[t] / step.block_size;
    const int64_t in_block = step.slots[t] % step.block_size;
    for (int64_t g = 0; g < step.num_kv_heads; ++g) {
      write((block * step.num_kv_heads + g) * step.block_size + in_block,
            t * step.key_token_stride + g * step.key_head_stride,
            t * step.value_token_stride + g * step.value_head_stride);
    }
  }
}

template <int W, typename Element>
MOESERVE_INLINE void write_float8(const CacheWrite& step, int64_t first, int64_t last) {
  const auto size = static_cast<int>(step.head_size);
  const auto value_size = static_cast<int>(step.value_size);
  const auto* keys = static_cast<const Element*>(step.key);
  const auto* values = static_cast<const Element*>(step.value);
  auto* key_cache = static_cast<uint8_t*>(step.key_cache);
  auto* value_cache = static_cast<uint8_t*>(step.value_cache);
  for_heads(step, first, last, [&](int64_t row, int64_t key, int64_t value) __attribute__((always_inline)) {
    step.key_scales[row] = encode_float8_row<W>(keys + key, size, key_cache + row * size);
    step.value_scales[row] = encode_float8_row<W>(values + value, value_size, value_cache + row * value_size);
  });
}

MOESERVE_DEFINE_TYPED_VARIANTS(write_float8, step.type, (const CacheWrite& step, int64_t first, int64_t last),
                               (step, first, last))

}  // namespace

void write_cache(const CacheWrite& step) {
  const int64_t num_slots = step.num_blocks * step.block_size;
  for (int64_t t = 0; t < step.num_tokens; ++t) {
    if (step.slots[t] < -1 || step.slots[t] >= num_slots) {
      throw std::invalid_argument("write_cache: token " + std::to_string(t) + " has slot " +
                                  std::to_string(step.slots[t]) + ", but there are " + std::to_string(num_slots));
    }
  }
  const int64_t key_bytes = step.head_size * element_bytes(step.type);
  const int64_t value_bytes = step.value_size * element_bytes(step.type);
  if (step.key_scales != nullptr) {
    const auto run = choose_write_float8_of_type(current_isa());
    for_rows(step.num_tokens, step.num_kv_heads * (key_bytes + value_bytes),
             [&](int64_t first, int64_t last) { run(step, first, last); });
    return;
  }
  // Runs on the calling thread, because a step writes few bytes.
  const auto* keys = static_cast<const char*>(step.key);
  const auto* values = static_cast<const char*>(step.value);
  auto* key_cache = static_cast<char*>(step.key_cache);
  auto* value_cache = static_cast<char*>(step.value_cache);
  const int64_t width = element_bytes(step.type);
  for_heads(step, 0, step.num_tokens, [&](int64_t row, int64_t key, int64_t value) {
    std::memcpy(key_cache + row * key_bytes, keys + key * width, key_bytes);
    if (values != nullptr) std::memcpy(value_cache + row * value_bytes, values + value * width, value_bytes);
  });
}

}  // namespace moeserve
