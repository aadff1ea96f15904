// Sleeping until another process changes a word of memory that both map, and other parts of waiting that depend on the
// system or the processor.

#pragma once

#include <atomic>
#include <cstdint>

namespace moeserve {

// Sleep while the word is `seen`, until `wake_sleeper` or the end of the time: in the kernel, or in naps on a system on
// which processes cannot sleep on a shared word. May return earlier. Returns false after a signal.
bool sleep_on_word(std::atomic<uint32_t>& word, uint32_t seen, double seconds);

// Wake the process or thread that sleeps on a word, which has been changed before.
void wake_sleeper(std::atomic<uint32_t>& word);
// Wake all that sleep on it.
void wake_sleepers(std::atomic<uint32_t>& word);

// Do the same in short naps, which end soon after the word has changed, on any POSIX system.
bool nap_on_word(std::atomic<uint32_t>& word, uint32_t seen, double seconds);

// Lower the power of this core for a moment, and give it to its other thread. For loops that spin.
inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace moeserve
