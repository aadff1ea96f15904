// Waiting for the data of other ranks: spinning, sleeping, wake-ups, and the detection of dead ranks.

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <optional>

#include "progress_record.h"
#include "shared_memory_layout.h"
#include "word_wait.h"

namespace moeserve {

namespace {

// Interval of the checks for dead ranks while sleeping: at first, and after a long wait.
constexpr double kFirstCheck_s = 0.01;
constexpr double kLastCheck_s = 0.05;

// Spinning before sleeping pays only if the other ranks run on free cores of their own. After kMaxFailedSpins failures
// it is tried once per kWaitsPerTrial waits, until it succeeds again.
constexpr int kSpinsPerClockRead = 32;
constexpr uint64_t kMaxFailedSpins = 4;
constexpr uint64_t kWaitsPerTrial = 16;

// Waits are measured for operations with a smaller index in their step.
constexpr uint64_t kMaxIndex = 4096;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Measures a wait: adds the time since `begin`, if it was called, to totals[number], if it exists.
class Stopwatch {
 public:
  Stopwatch(std::vector<double>& totals, uint64_t number) : totals_(totals), number_(number) {}
  Stopwatch(const Stopwatch&) = delete;
  ~Stopwatch() {
    if (began_ != 0 && number_ < totals_.size()) totals_[number_] += now() - began_;
  }
  void begin() { began_ = now(); }

 private:
  std::vector<double>& totals_;
  const uint64_t number_;
  double began_ = 0;
};

}  // namespace

void SharedMemory::begin_step() {
  const std::lock_guard<std::mutex> lock(mutex_);
  first_of_step_ = next_number_;
}

std::vector<double> SharedMemory::seconds_waited() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return seconds_waited_;
}

Outcome SharedMemory::wait(uint64_t number, double timeout_s, bool is_measured) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // Operations from before the step have a huge index and are not measured.
  const uint64_t index = is_measured ? number - first_of_step_ : kMaxIndex;
  if (index >= seconds_waited_.size() && index < kMaxIndex) seconds_waited_.resize(index + 1);
  Stopwatch stopwatch(seconds_waited_, index);
  std::optional<PhaseGuard> phase;
  double deadline = 0;
  while (true) {
    if (is_closing_) return Outcome::kClosed;
    if (failure_ != Outcome::kDone) return failure_;
    progress();
    if (failure_ != Outcome::kDone) return failure_;
    if (is_done(number)) return is_closing_ ? Outcome::kClosed : Outcome::kDone;
    if (deadline == 0) {
      stopwatch.begin();
      phase.emplace(Phase::kWaiting);
      count(progress_record().num_looks);
      deadline = now() + timeout_s;
      if (last_waited_ != number) check_interval_ = kFirstCheck_s;
      last_waited_ = number;
      next_check_ = now() + check_interval_;
    }
    if (spin()) continue;
    if (failure_ != Outcome::kDone) return failure_;
    if (!lost_ranks(number).empty()) {
      progress();  // read what they sent before they left
      const std::vector<int> still_lost = lost_ranks(number);
      if (!still_lost.empty()) return fail(Outcome::kLost, still_lost);
      continue;
    }
    const double remaining_s = deadline - now();
    if (remaining_s <= 0) return fail(Outcome::kTimeout, missing_ranks(number));
    if (!sleep(number, remaining_s)) return Outcome::kInterrupted;
    if (now() >= next_check_) {
      find_dead_ranks();
      check_interval_ = std::min(2 * check_interval_, kLastCheck_s);
      return Outcome::kInterrupted;
    }
  }
}

bool SharedMemory::spin() {
  const bool is_trial = num_failed_spins_ < kMaxFailedSpins || num_failed_spins_ % kWaitsPerTrial == 0;
  const double deadline = is_trial ? now() + spin_s_ : 0;
  do {
    for (int i = 0; i < kSpinsPerClockRead; ++i) {
      if (progress()) {
        num_failed_spins_ = 0;
        return true;
      }
      pause_core();
    }
  } while (is_trial && now() < deadline && failure_ == Outcome::kDone);
  ++num_failed_spins_;
  return false;
}

// Sleep until all ranks with missing data have sent some. A rank that still has data to send but no free slot wakes on
// any event instead, because others may be waiting for its data.
bool SharedMemory::sleep(uint64_t number, double remaining_s) {
  Doorbell& doorbell = *memories_[rank_].doorbell;
  const uint32_t seen = doorbell.num_rings.load(std::memory_order_acquire);
  const bool has_unsent = sending_ < next_number_;
  uint64_t awaited = 0;
  if (!has_unsent) {
    for (int rank : missing_ranks(number)) awaited |= bit_of(rank);
  }
  doorbell.awaited.store(awaited == 0 ? kAnyEvent : awaited, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const bool has_moved = progress();
  bool is_uninterrupted = true;
  if (!has_moved && failure_ == Outcome::kDone && !is_closing_ && lost_ranks(number).empty()) {
    if (has_unsent) {
      // A sleeping reader must free a slot first: it may be waiting for data that this rank cannot send yet.
      const int64_t slot = static_cast<int64_t>(num_chunks_ % slots_.num_slots);
      for (int rank = 0; rank < num_ranks_; ++rank) {
        if (uses_[slot * num_ranks_ + rank] == 0 || woken_at_[rank] == num_chunks_ + 1) continue;
        woken_at_[rank] = num_chunks_ + 1;
        if (memories_[rank].doorbell->awaited.load(std::memory_order_relaxed) != 0) ring(rank);
      }
    }
    const auto sleep_while_unchanged = naps_ ? nap_on_word : sleep_on_word;
    is_uninterrupted = sleep_while_unchanged(doorbell.num_rings, seen, std::min(remaining_s, check_interval_));
  }
  doorbell.awaited.store(0, std::memory_order_relaxed);
  return is_uninterrupted;
}

// Clear this rank in the set for which another rank waits, and wake it if the set is now empty.
void SharedMemory::wake(int rank, uint64_t what) {
  Doorbell& doorbell = *memories_[rank].doorbell;
  const uint64_t awaited = doorbell.awaited.load(std::memory_order_relaxed);
  if ((awaited & what) == 0) return;
  // The owner may have gone to sleep again in between. It is then woken too early, which is harmless, but never too
  // late: the rank that clears the last bit rings.
  if (awaited & kAnyEvent) {
    if (doorbell.awaited.exchange(0, std::memory_order_acq_rel) != 0) ring(rank);
  } else if (doorbell.awaited.fetch_and(~bit_of(rank_), std::memory_order_acq_rel) == bit_of(rank_)) {
    ring(rank);
  }
}

void SharedMemory::ring(int rank) {
  std::atomic<uint32_t>& num_rings = memories_[rank].doorbell->num_rings;
  num_rings.fetch_add(1, std::memory_order_acq_rel);
  wake_sleeper(num_rings);
}

void SharedMemory::find_dead_ranks() {
  std::vector<pollfd> polled;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    polled.push_back({rank == rank_ ? -1 : sockets_[rank], POLLIN, 0});  // nobody sends: it is readable when closed
  }
  if (poll(polled.data(), polled.size(), 0) <= 0) return;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (polled[rank].revents != 0) is_dead_[rank] = 1;
  }
}

// Return the ranks whose data or acknowledgement is missing.
std::vector<int> SharedMemory::missing_ranks(uint64_t number) {
  std::vector<int> ranks;
  if (is_done(number)) return ranks;
  const uint64_t first = first_number();
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (rank == rank_) continue;
    bool is_missing = false;
    if (number >= first) {
      is_missing = operations_[number - first].parts[rank].is_open && !has_message(rank);
    }
    if (!is_sent(number)) {
      const uint64_t use = uses_[num_chunks_ % slots_.num_slots * num_ranks_ + rank];
      is_missing |= memories_[rank].acknowledgements[rank_].num_read.load(std::memory_order_acquire) < use;
    }
    if (is_missing) ranks.push_back(rank);
  }
  return ranks;
}

std::vector<int> SharedMemory::lost_ranks(uint64_t number) {
  std::vector<int> ranks;
  if (number < first_number()) return ranks;
  const Operation& operation = operations_[number - first_number()];
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (operation.parts[rank].is_open && !can_still_read(rank) && !has_message(rank)) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace moeserve
