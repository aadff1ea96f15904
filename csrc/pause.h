// For loops that look for news again and again. Knows nothing else.

#pragma once

namespace moeserve {

// Leaves the core to its other thread, or saves power, for some cycles.
inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace moeserve
