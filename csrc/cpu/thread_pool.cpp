// Wake-up of the workers, and detection of the end of a job.

#include "thread_pool.h"

#include <chrono>

#include "pause.h"

namespace moeserve {

namespace {

using Clock = std::chrono::steady_clock;

// Time that an idle worker spins before it sleeps. Waking a sleeping worker takes about as long.
constexpr auto kSpinTime = std::chrono::microseconds(30);
constexpr int kSpinsPerClockRead = 32;

// Spin until is_done() or until kSpinTime is over. Returns is_done().
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
  for (int i = 0; i < num_workers; ++i) workers_.emplace_back([this] { work(); });
}

void ThreadPool::run(Items& items) {
  items_ = &items;
  num_openings_.store(num_workers(), std::memory_order_release);
  ++round_;
  if (num_sleeping_ > 0) {
    // Taking the lock ensures that a worker about to sleep either sees the new round or receives the notification.
    {
      const std::lock_guard<std::mutex> lock(mutex_);
    }
    wake_.notify_all();
  }
  items.run_all();

  // No worker can join from here on. Wait for those that did.
  const int num_joined = num_workers() - num_openings_.exchange(0);
  const auto all_finished = [&] { return num_finished_.load(std::memory_order_acquire) == num_joined; };
  while (!spin_until(all_finished)) std::this_thread::yield();
  num_finished_.store(0, std::memory_order_relaxed);
}

void ThreadPool::work() {
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
      items_->run_all();
      num_finished_.fetch_add(1, std::memory_order_release);
    }
  }
}

bool ThreadPool::join_job() {
  int num_openings = num_openings_.load(std::memory_order_acquire);
  while (num_openings > 0) {
    if (num_openings_.compare_exchange_weak(num_openings, num_openings - 1, std::memory_order_acq_rel)) return true;
  }
  return false;
}

}  // namespace moeserve
