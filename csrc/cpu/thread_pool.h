// A pool of threads that work on one job at a time.

#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace moeserve {

// The items of a job, which any number of threads process one by one.
//
// Each thread starts with a range of its own, so that neighbouring items are mostly processed in order by one thread,
// which suits the memory prefetchers. A thread that has finished its range helps with the others.
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
  void run_all() {
    const int own = num_joined_.fetch_add(1, std::memory_order_relaxed) % num_ranges_;
    for (int i = 0; i < num_ranges_; ++i) {
      Range& range = ranges_[(own + i) % num_ranges_];
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
  std::atomic<int> num_joined_{0};
  Range ranges_[kMaxRanges];
};

// Workers spin for a moment for a new job, then sleep. The caller of `run` works too and waits for items, not for
// workers: a worker that wakes up late is not waited for.
class ThreadPool {
 public:
  ThreadPool() = default;
  ~ThreadPool();

  // Throws std::system_error if the system refuses a thread. Must be called once.
  void start(int num_workers);
  int num_workers() const { return static_cast<int>(workers_.size()); }

  // Must not be called from two threads at once.
  void run(Items& items);

 private:
  void work();
  bool join_job();

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<int> num_sleeping_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<uint64_t> round_{0};  // jobs so far

  // The current job: written by the caller while no worker has joined, read by workers that have.
  Items* items_ = nullptr;
  std::atomic<int> num_openings_{0};  // workers that may still join
  std::atomic<int> num_finished_{0};  // workers that joined and are done
};

}  // namespace moeserve
