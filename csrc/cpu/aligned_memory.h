// Memory of a thread that is used again for other sizes.

#pragma once

#include <cstdint>
#include <vector>

namespace moeserve {

// Returns room for `count` numbers that begins at a cache line. Earlier contents are lost when the memory grows.
template <typename Number>
Number* aligned(std::vector<Number>& memory, int64_t count) {
  constexpr int64_t kPadding = 64 / sizeof(Number);
  if (static_cast<int64_t>(memory.size()) < count + kPadding) memory.resize(count + kPadding);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  return reinterpret_cast<Number*>((address + 63) / 64 * 64);
}

}  // namespace moeserve
