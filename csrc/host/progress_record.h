// The progress of this process, in memory that another process reads to find ranks that are stopped or hang.

#pragma once

#include <atomic>
#include <cstdint>

namespace moeserve {

// What a rank does, as far as it matters to those who wait for it. The numbers are those of `Phase` in Python.
enum class Phase : uint32_t {
  kLoading = 0,  // what new memory says
  kIdle = 1,
  kComputing = 2,
  kWaiting = 3,  // for other ranks; `num_looks` grows meanwhile
  kBlocked = 4,  // waiting in a library, in which nothing is counted
  kUpdating = 5,
};

// Only the owner writes. Counters only grow, except that `layer` starts again in each round.
struct alignas(64) ProgressRecord {
  std::atomic<uint64_t> heartbeat;
  std::atomic<uint64_t> round;
  std::atomic<uint64_t> num_collectives;
  std::atomic<uint64_t> num_kernels;
  std::atomic<uint64_t> num_reads;  // major page faults, and blocks read from disks
  std::atomic<uint64_t> num_looks;
  std::atomic<uint32_t> layer;
  std::atomic<uint32_t> phase;
  std::atomic<uint64_t> epoch;
};
static_assert(sizeof(ProgressRecord) == 64, "records have a cache line each");

// The record of this process: memory of its own until `attach_progress` is called.
ProgressRecord& progress_record();

// Use the record with this index in a file of records from now on, and let a thread write heartbeats to it.
// Throws std::runtime_error if the file cannot be mapped or is too small.
void attach_progress(int fd, int64_t index);

// Add one without a locked instruction. If two threads add at once, the counter still changes.
inline void count(std::atomic<uint64_t>& counter) {
  counter.store(counter.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

// Sets a phase, and restores the one before.
class PhaseGuard {
 public:
  explicit PhaseGuard(Phase phase)
      : record_(progress_record()),
        before_(record_.phase.exchange(static_cast<uint32_t>(phase), std::memory_order_relaxed)) {}
  PhaseGuard(const PhaseGuard&) = delete;
  ~PhaseGuard() { record_.phase.store(before_, std::memory_order_relaxed); }

 private:
  ProgressRecord& record_;
  const uint32_t before_;
};

}  // namespace moeserve
