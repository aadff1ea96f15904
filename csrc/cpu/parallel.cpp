// Division of the items of a kernel among the OpenMP threads of torch.

#include "parallel.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace moeserve {

namespace {

// The entry point that GCC compiles `#pragma omp parallel` to, and that other OpenMP runtimes offer as well. A runtime
// keeps its threads between regions only if both request the same number, so we always request all.
using GompParallel = void (*)(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);

GompParallel find_openmp() {
  static std::atomic<GompParallel> found{nullptr};
  if (found == nullptr) found = reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return found;
}

std::atomic<int> wanted_threads{1};
std::atomic<bool> is_busy{false};
std::atomic<bool> is_forked{false};

// Runs in the child of a fork, where the threads do not exist and the runtime would wait for them forever.
void forget_threads() { is_forked = true; }

struct BusyGuard {
  ~BusyGuard() { is_busy.store(false, std::memory_order_release); }
};

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

// The other threads of an OpenMP region, which wait for jobs of the calling thread.
class Team {
 public:
  // Help with jobs until `dismiss`.
  void help() {
    for (int num_waits = 0; !is_dismissed_.load(std::memory_order_acquire);) {
      if (job_.load(std::memory_order_relaxed) == nullptr) {
        pause_briefly(++num_waits);
        continue;
      }
      num_waits = 0;
      // A thread counts itself before it reads the job, and `run` clears the job before it reads the count, all in one
      // order: so no thread has a job that has ended.
      num_inside_.fetch_add(1);
      if (Items* items = job_.load()) items->run_all();
      num_inside_.fetch_sub(1);
    }
  }

  void run(Items& items) {
    job_.store(&items);
    items.run_all();
    job_.store(nullptr);
    for (int num_waits = 0; num_inside_.load() > 0;) pause_briefly(++num_waits);
  }

  void dismiss() { is_dismissed_.store(true, std::memory_order_release); }

 private:
  // After a while, other processes that want the core come first.
  static void pause_briefly(int num_waits) {
    if (num_waits > kMaxSpins) return std::this_thread::yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  static constexpr int kMaxSpins = 1000;

  alignas(64) std::atomic<Items*> job_{nullptr};
  alignas(64) std::atomic<int> num_inside_{0};
  alignas(64) std::atomic<bool> is_dismissed_{false};
};

thread_local Team* team_of_this_thread = nullptr;

}  // namespace

void set_num_threads(int num_threads) {
  if (num_threads < 1) {
    throw std::invalid_argument("num_threads=" + std::to_string(num_threads) + ", but it must be at least 1");
  }
  wanted_threads = num_threads;
}

int num_threads() { return wanted_threads; }

bool uses_openmp() { return find_openmp() != nullptr && !is_forked; }

// Return true if this call took the OpenMP threads. Then a BusyGuard gives them back.
static bool take_threads() {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_threads);
  (void)registered;
  return wanted_threads > 1 && uses_openmp() && !is_busy.exchange(true, std::memory_order_acquire);
}

void parallel_for(int64_t num_items, const std::function<void(int64_t)>& work) {
  const int num_threads = wanted_threads;
  if (team_of_this_thread != nullptr && num_items > 1) {
    Team* const team = std::exchange(team_of_this_thread, nullptr);  // an item may call this function
    Items items(num_items, num_threads, work);
    team->run(items);
    team_of_this_thread = team;
    return;
  }
  if (num_items <= 1 || !take_threads()) {
    for (int64_t item = 0; item < num_items; ++item) work(item);
    return;
  }
  const BusyGuard guard;
  Items items(num_items, num_threads, work);
  find_openmp()([](void* data) { static_cast<Items*>(data)->run_all(); }, &items, static_cast<unsigned>(num_threads),
                0);
}

void with_waiting_threads(const std::function<void()>& work) {
  if (!take_threads()) return work();
  const BusyGuard guard;
  struct Region {
    explicit Region(const std::function<void()>& work) : work(work) {}
    const std::function<void()>& work;
    const std::thread::id caller = std::this_thread::get_id();
    Team team;
    std::exception_ptr failure;
  } region(work);
  find_openmp()(
      [](void* data) {
        auto& region = *static_cast<Region*>(data);
        if (std::this_thread::get_id() != region.caller) return region.team.help();
        team_of_this_thread = &region.team;
        try {
          region.work();
        } catch (...) {
          region.failure = std::current_exception();
        }
        team_of_this_thread = nullptr;
        region.team.dismiss();
      },
      &region, static_cast<unsigned>(wanted_threads), 0);
  if (region.failure) std::rethrow_exception(region.failure);
}

}  // namespace moeserve
