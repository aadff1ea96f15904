// Futexes on Linux, their counterpart on macOS 14.4 and newer, and naps.

#include "word_wait.h"

#include <time.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__APPLE__) && __has_include(<os/os_sync_wait_on_address.h>)
#include <os/clock.h>
#include <os/os_sync_wait_on_address.h>
#define MOESERVE_HAS_OS_SYNC
#endif

namespace moeserve {

namespace {

// The first naps are short, because data mostly arrives soon. The longest one costs less than 1% of a core.
constexpr double kFirstNap_s = 20e-6;
constexpr double kLongestNap_s = 2e-3;
constexpr double kNapGrowth = 1.5;

timespec as_timespec(double seconds) {
  timespec time;
  time.tv_sec = static_cast<time_t>(seconds);
  time.tv_nsec = static_cast<long>((seconds - static_cast<double>(time.tv_sec)) * 1e9);
  return time;
}

}  // namespace

#if defined(__linux__)

bool sleep_on_word(std::atomic<uint32_t>& word, uint32_t seen, double seconds) {
  const timespec time = as_timespec(seconds);
  return syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0) == 0 || errno != EINTR;
}

void wake_sleeper(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, 1, nullptr, nullptr, 0); }
void wake_sleepers(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

#elif defined(MOESERVE_HAS_OS_SYNC)

bool sleep_on_word(std::atomic<uint32_t>& word, uint32_t seen, double seconds) {
  if (__builtin_available(macOS 14.4, *)) {
    const uint64_t nanoseconds = std::max<uint64_t>(1, static_cast<uint64_t>(seconds * 1e9));  // 0 is refused
    return os_sync_wait_on_address_with_timeout(&word, seen, sizeof(seen), OS_SYNC_WAIT_ON_ADDRESS_SHARED,
                                                OS_CLOCK_MACH_ABSOLUTE_TIME, nanoseconds) >= 0 ||
           errno != EINTR;
  }
  return nap_on_word(word, seen, seconds);
}

void wake_sleeper(std::atomic<uint32_t>& word) {
  if (__builtin_available(macOS 14.4, *)) {
    os_sync_wake_by_address_any(&word, sizeof(uint32_t), OS_SYNC_WAKE_BY_ADDRESS_SHARED);
  }
}
void wake_sleepers(std::atomic<uint32_t>& word) {
  if (__builtin_available(macOS 14.4, *)) {
    os_sync_wake_by_address_all(&word, sizeof(uint32_t), OS_SYNC_WAKE_BY_ADDRESS_SHARED);
  }
}

#else

bool sleep_on_word(std::atomic<uint32_t>& word, uint32_t seen, double seconds) {
  return nap_on_word(word, seen, seconds);
}
void wake_sleeper(std::atomic<uint32_t>&) {}
void wake_sleepers(std::atomic<uint32_t>&) {}

#endif

bool nap_on_word(std::atomic<uint32_t>& word, uint32_t seen, double seconds) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point began = Clock::now();
  double nap_s = kFirstNap_s;
  while (word.load(std::memory_order_acquire) == seen) {
    const double left_s = seconds - std::chrono::duration<double>(Clock::now() - began).count();
    if (left_s <= 0) break;
    const timespec time = as_timespec(std::min(nap_s, left_s));
    if (nanosleep(&time, nullptr) != 0 && errno == EINTR) return false;
    nap_s = std::min(nap_s * kNapGrowth, kLongestNap_s);
  }
  return true;
}

}  // namespace moeserve
