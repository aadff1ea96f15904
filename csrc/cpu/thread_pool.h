// A pool of threads that work on one job at a time. Knows no kernel.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace moeserve {

// The items of a job, which any number of threads take one by one until none is left.
class Items {
 public:
  Items(int64_t num_items, const std::function<void(int64_t)>& work) : num_items_(num_items), work_(work) {}

  void take() {
    for (;;) {
      const int64_t item = next_.fetch_add(1, std::memory_order_relaxed);
      if (item >= num_items_) return;
      work_(item);
    }
  }

 private:
  const int64_t num_items_;
  const std::function<void(int64_t)>& work_;
  std::atomic<int64_t> next_{0};
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
