// How workers learn of a job, and how its end is known.

#include "thread_pool.h"

#include <chrono>

#include "pause.h"

namespace moeserve {

namespace {

using Clock = std::chrono::steady_clock;

// How long a thread without work looks for some before it sleeps. Waking a sleeper takes about as long.
constexpr auto kSpinTime = std::chrono::microseconds(30);
constexpr int kSpinsPerClockRead = 32;

// Spins until is_done() or until kSpinTime is over. Returns is_done().
template <typename Condition>
bool spin_until(const Condition& is_done) {
  const auto deadline = Clock::now() + kSpinTime;
  do {
    for (int i = 0; i < kSpinsPerClockRead; ++i) {
      if (is_done()) return true;
      pause_briefly();
    }
  } while (Clock::now() < deadline);
  return is_done();
}

}  // namespace

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    ++round_;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::start(int num_workers) {
  workers_.reserve(num_workers);
  for (int i = 0; i < num_workers; ++i) workers_.emplace_back([this] { live(); });
}

void ThreadPool::run(Items& items) {
  items_ = &items;
  num_seats_.store(num_workers(), std::memory_order_release);
  ++round_;
  if (num_sleeping_ > 0) {
    // Holding the lock for a moment makes sure that a worker about to sleep sees the new round or hears the call.
    {
      const std::lock_guard<std::mutex> lock(mutex_);
    }
    wake_.notify_all();
  }
  items.take();

  // From here on no worker joins; those that did are waited for.
  const int num_joined = num_workers() - num_seats_.exchange(0);
  const auto all_finished = [&] { return num_finished_.load(std::memory_order_acquire) == num_joined; };
  while (!spin_until(all_finished)) std::this_thread::yield();
  num_finished_.store(0, std::memory_order_relaxed);
}

void ThreadPool::live() {
  uint64_t seen_round = 0;
  while (true) {
    const auto is_new_round = [&] { return round_ != seen_round; };
    if (!spin_until(is_new_round)) {
      std::unique_lock<std::mutex> lock(mutex_);
      ++num_sleeping_;
      wake_.wait(lock, is_new_round);
      --num_sleeping_;
    }
    seen_round = round_;
    if (stopping_) return;
    if (join_job()) {
      items_->take();
      num_finished_.fetch_add(1, std::memory_order_release);
    }
  }
}

bool ThreadPool::join_job() {
  int num_seats = num_seats_.load(std::memory_order_acquire);
  while (num_seats > 0) {
    if (num_seats_.compare_exchange_weak(num_seats, num_seats - 1, std::memory_order_acq_rel)) return true;
  }
  return false;
}

}  // namespace moeserve
