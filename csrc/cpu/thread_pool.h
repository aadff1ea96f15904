// A pool of threads that work on one job at a time. Knows no kernel.

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

// The items of a job, which any number of threads take one by one until none is left.
//
// Each thread has a range of its own, so that neighbours are mostly done by one thread in order, as memory likes to be
// read; one that has finished its range helps with those of others.
class Items {
 public:
  Items(int64_t num_items, int num_threads, const std::function<void(int64_t)>& work)
      : num_ranges_(std::min(num_threads, kMaxRanges)), work_(work) {
    for (int i = 0; i < num_ranges_; ++i) {
      ranges_[i].next.store(num_items * i / num_ranges_, std::memory_order_relaxed);
      ranges_[i].end = num_items * (i + 1) / num_ranges_;
    }
  }

  // Of each thread that works on the job, once.
  void take() {
    const int own = num_takers_.fetch_add(1, std::memory_order_relaxed) % num_ranges_;
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
  std::atomic<int> num_takers_{0};
  Range ranges_[kMaxRanges];
};

// Workers look for a new job for a moment, then sleep. The caller of `run` works too, and waits for items, not for
// workers: one that the system wakes late finds the work done and is not waited for.
class ThreadPool {
 public:
  ThreadPool() = default;
  ~ThreadPool();

  // Throws std::system_error where the system refuses a thread. To be called once.
  void start(int num_workers);
  int num_workers() const { return static_cast<int>(workers_.size()); }

  // Not from two threads at once.
  void run(Items& items);

 private:
  void live();
  bool join_job();

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<int> num_sleeping_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<uint64_t> round_{0};  // jobs so far

  // The job. Written by the caller while no worker has joined, read by workers that have.
  Items* items_ = nullptr;
  std::atomic<int> num_seats_{0};     // workers that may still join
  std::atomic<int> num_finished_{0};  // workers that joined and are done
};

}  // namespace moeserve
