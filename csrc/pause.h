// The pause instruction of spin loops.

#pragma once

namespace moeserve {

// Yield the core to its sibling thread, or save power, for some cycles.
inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace moeserve
