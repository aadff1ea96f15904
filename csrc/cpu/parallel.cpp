// A team of threads, and the division of the items of a kernel among them.

#include "parallel.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#include "../host/progress_record.h"
#include "../host/word_wait.h"

namespace moeserve {

namespace {

// How long a thread waits awake, which is faster, before it sleeps, which leaves the core to other processes.
constexpr std::chrono::microseconds kAwake{200};
constexpr double kLongestSleep_s = 3600;  // sleepers look again then, for want of a limitless sleep

// Return when the word is no longer `seen`. Whoever changes the word must wake its sleepers.
void wait_for_change(std::atomic<uint32_t>& word, uint32_t seen, std::atomic<uint32_t>& num_sleepers) {
  const auto began = std::chrono::steady_clock::now();
  do {
    for (int i = 0; i < 32; ++i) {
      if (word.load(std::memory_order_acquire) != seen) return;
      pause_core();
    }
  } while (std::chrono::steady_clock::now() - began < kAwake);
  num_sleepers.fetch_add(1);
  while (word.load() == seen) sleep_on_word(word, seen, kLongestSleep_s);
  num_sleepers.fetch_sub(1);
}

// The items of a job, which several threads process one by one.
//
// Each thread starts with its own range, so that one thread processes neighbouring items in order, which suits the
// memory prefetchers. A thread that has finished its range takes items of the other ranges.
class Items {
 public:
  Items(int64_t num_items, int num_threads, const std::function<void(int64_t)>& work)
      : num_ranges_(std::min(num_threads, kMaxRanges)), work_(work) {
    for (int i = 0; i < num_ranges_; ++i) {
      ranges_[i].next.store(num_items * i / num_ranges_, std::memory_order_relaxed);
      ranges_[i].end = num_items * (i + 1) / num_ranges_;
    }
  }

  // Process items until none is left. Each thread of the job calls this once.
  void run_all(int thread) {
    for (int i = 0; i < num_ranges_; ++i) {
      Range& range = ranges_[(thread + i) % num_ranges_];
      for (;;) {
        const int64_t item = range.next.fetch_add(1, std::memory_order_relaxed);
        if (item >= range.end) break;
        work_(item);
      }
    }
  }

 private:
  static constexpr int kMaxRanges = 64;

  struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end;
  };

  const int num_ranges_;
  const std::function<void(int64_t)>& work_;
  Range ranges_[kMaxRanges];
};

// The calling thread and its workers. The caller opens a job. Workers that are awake join it; the caller waits for
// those that have joined, and for no others. A worker without a core therefore delays nothing.
class Team {
 public:
  void run(Items& items, int num_threads) {
    start(num_threads - 1);
    items_ = &items;
    num_wanted_.store(num_threads - 1, std::memory_order_relaxed);
    joined_.store(kOpen, std::memory_order_release);
    job_.fetch_add(1);
    if (num_asleep_.load() > 0) wake_sleepers(job_);
    items.run_all(0);
    joined_.fetch_and(~kOpen);
    for (uint32_t left = joined_.load(); left != 0; left = joined_.load()) {
      wait_for_change(joined_, left, num_callers_asleep_);
    }
  }

 private:
  static constexpr uint32_t kOpen = uint32_t{1} << 31;

  void start(int num_workers) {
    if (num_started_ >= num_workers) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of Python
    for (; num_started_ < num_workers; ++num_started_) {
      std::thread([this, thread = num_started_ + 1, job = job_.load()] { serve(thread, job); }).detach();
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  // Take part in every job that is open when this thread notices it.
  [[noreturn]] void serve(int thread, uint32_t job) {
    for (;;) {
      wait_for_change(job_, job, num_asleep_);
      job = job_.load();
      uint32_t joined = joined_.load();
      while ((joined & kOpen) != 0 && thread <= num_wanted_.load(std::memory_order_relaxed)) {
        if (!joined_.compare_exchange_weak(joined, joined + 1)) continue;
        items_->run_all(thread);
        joined_.fetch_sub(1);
        if (num_callers_asleep_.load() > 0) wake_sleepers(joined_);
        break;
      }
    }
  }

  alignas(64) std::atomic<uint32_t> job_{0};  // number of jobs so far
  std::atomic<uint32_t> num_asleep_{0};
  alignas(64) std::atomic<uint32_t> joined_{0};  // number of workers in the job, and kOpen while others may join
  std::atomic<uint32_t> num_callers_asleep_{0};
  std::atomic<int> num_wanted_{0};
  Items* items_ = nullptr;
  int num_started_ = 0;
};

// The team is never destroyed, because its threads still run while the process exits. The child of a fork has none of
// these threads, and makes a team of its own.
Team* team = nullptr;

std::atomic<int> wanted_threads{1};
std::atomic<bool> is_busy{false};

void forget_team() {
  team = nullptr;
  is_busy = false;
}

struct BusyGuard {
  ~BusyGuard() { is_busy.store(false, std::memory_order_release); }
};

}  // namespace

void set_num_threads(int num_threads) {
  if (num_threads < 1) {
    throw std::invalid_argument("num_threads=" + std::to_string(num_threads) + ", but it must be at least 1");
  }
  wanted_threads = num_threads;
}

int num_threads() { return wanted_threads; }

void parallel_for(int64_t num_items, const std::function<void(int64_t)>& work) {
  count(progress_record().num_kernels);
  const int num_threads = wanted_threads;
  if (num_threads == 1 || num_items <= 1 || is_busy.exchange(true, std::memory_order_acquire)) {
    for (int64_t item = 0; item < num_items; ++item) work(item);
    return;
  }
  const BusyGuard guard;
  static const int registered = pthread_atfork(nullptr, nullptr, forget_team);
  (void)registered;
  if (team == nullptr) team = new Team;
  Items items(num_items, num_threads, work);
  team->run(items, num_threads);
}

}  // namespace moeserve
