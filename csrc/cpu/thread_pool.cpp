// A pool of std::threads, a job at a time, items taken from an atomic counter.

#include "thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace moeserve {

namespace {

using Clock = std::chrono::steady_clock;

// How long a thread without work looks for some before it sleeps. Waking a sleeper takes about as long.
constexpr auto kSpinTime = std::chrono::microseconds(30);
constexpr int kSpinsPerClockRead = 32;

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until done() or until kSpinTime is over. Returns done().
template <typename Done>
bool spin_until(const Done& done) {
  const auto deadline = Clock::now() + kSpinTime;
  do {
    for (int i = 0; i < kSpinsPerClockRead; ++i) {
      if (done()) return true;
      pause_briefly();
    }
  } while (Clock::now() < deadline);
  return done();
}

class Pool {
 public:
  Pool() = default;

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      round_.fetch_add(1);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  // Not in the constructor: where the system refuses a thread, the destructor stops those before it.
  void start(int num_workers) {
    workers_.reserve(num_workers);
    for (int i = 0; i < num_workers; ++i) workers_.emplace_back([this] { live(); });
  }

  int num_workers() const { return static_cast<int>(workers_.size()); }

  void run(int64_t num_items, int max_threads, const std::function<void(int64_t)>& work) {
    work_ = &work;
    num_items_ = num_items;
    next_item_.store(0, std::memory_order_relaxed);
    seats_.store(std::min(max_threads - 1, num_workers()), std::memory_order_release);
    round_.fetch_add(1);
    if (num_sleeping_.load() > 0) {
      // Taking the lock makes sure that a thread about to sleep either sees the new round or hears the call.
      {
        std::lock_guard<std::mutex> lock(mutex_);
      }
      wake_.notify_all();
    }
    take_items();

    // No seat may be taken from here on; then wait for those who sit.
    const int open_seats = seats_.exchange(kClosed);
    const int num_joined = std::min(max_threads - 1, num_workers()) - open_seats;
    const auto all_left = [&] { return num_left_.load(std::memory_order_acquire) == num_joined; };
    while (!spin_until(all_left)) std::this_thread::yield();
    num_left_.store(0, std::memory_order_relaxed);
  }

 private:
  static constexpr int kClosed = 0;

  void live() {
    uint64_t seen_round = 0;
    while (true) {
      const auto new_round = [&] { return round_.load() != seen_round; };
      if (!spin_until(new_round)) {
        std::unique_lock<std::mutex> lock(mutex_);
        num_sleeping_.fetch_add(1);
        wake_.wait(lock, new_round);
        num_sleeping_.fetch_sub(1);
      }
      seen_round = round_.load();
      if (stopping_) return;
      if (take_seat()) {
        take_items();
        num_left_.fetch_add(1, std::memory_order_release);
      }
    }
  }

  bool take_seat() {
    int open = seats_.load(std::memory_order_acquire);
    while (open > kClosed) {
      if (seats_.compare_exchange_weak(open, open - 1, std::memory_order_acq_rel)) return true;
    }
    return false;
  }

  void take_items() {
    for (;;) {
      const int64_t item = next_item_.fetch_add(1, std::memory_order_relaxed);
      if (item >= num_items_) return;
      (*work_)(item);
    }
  }

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<int> num_sleeping_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<uint64_t> round_{0};  // jobs so far

  // The job. Written by the caller while no worker has a seat, read by workers that have one.
  const std::function<void(int64_t)>* work_ = nullptr;
  int64_t num_items_ = 0;
  alignas(64) std::atomic<int64_t> next_item_{0};
  alignas(64) std::atomic<int> seats_{kClosed};  // how many more workers may join
  std::atomic<int> num_left_{0};                 // workers that joined and are done
};

std::atomic<int> wanted_threads{1};
std::atomic<bool> busy{false};
Pool* pool = nullptr;  // never destroyed at exit; guarded by `busy`

// The child of a fork has none of its parent's threads: it forgets the pool without touching it.
void forget_pool() {
  pool = nullptr;
  busy.store(false);
}

struct BusyGuard {
  ~BusyGuard() { busy.store(false, std::memory_order_release); }
};

}  // namespace

void set_num_threads(int num_threads) {
  if (num_threads < 1) {
    throw std::invalid_argument("num_threads=" + std::to_string(num_threads) + ", but it must be at least 1");
  }
  wanted_threads.store(num_threads);
}

int num_threads() { return wanted_threads.load(); }

void parallel_for(int64_t num_items, int max_threads, const std::function<void(int64_t)>& work) {
  const int wanted = wanted_threads.load();
  max_threads = static_cast<int>(std::min<int64_t>({max_threads, wanted, num_items}));
  if (max_threads <= 1 || busy.exchange(true, std::memory_order_acquire)) {
    for (int64_t item = 0; item < num_items; ++item) work(item);
    return;
  }
  const BusyGuard guard;
  if (pool == nullptr || pool->num_workers() != wanted - 1) {
    static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
    (void)registered;
    delete pool;
    pool = nullptr;
    auto fresh = std::make_unique<Pool>();
    fresh->start(wanted - 1);
    pool = fresh.release();
  }
  pool->run(num_items, max_threads, work);
}

}  // namespace moeserve
