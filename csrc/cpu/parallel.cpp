// Division of the items of a kernel among the OpenMP threads of torch.

#include "parallel.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

namespace moeserve {

namespace {

// The function that GCC compiles `#pragma omp parallel` to, which other OpenMP runtimes provide too. A runtime keeps
// its threads between parallel regions only if all regions request the same number, so all threads are always
// requested.
using GompParallel = void (*)(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);

GompParallel find_openmp() {
  static std::atomic<GompParallel> found{nullptr};
  if (found == nullptr) found = reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return found;
}

std::atomic<int> wanted_threads{1};
std::atomic<bool> is_busy{false};
std::atomic<bool> is_forked{false};

// Runs in the child of a fork, which lacks the threads, so that the runtime would wait for them forever.
void forget_threads() { is_forked = true; }

struct BusyGuard {
  ~BusyGuard() { is_busy.store(false, std::memory_order_release); }
};

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

}  // namespace

void set_num_threads(int num_threads) {
  if (num_threads < 1) {
    throw std::invalid_argument("num_threads=" + std::to_string(num_threads) + ", but it must be at least 1");
  }
  wanted_threads = num_threads;
}

int num_threads() { return wanted_threads; }

bool uses_openmp() { return find_openmp() != nullptr && !is_forked; }

void parallel_for(int64_t num_items, const std::function<void(int64_t)>& work) {
  const int num_threads = wanted_threads;
  if (num_threads == 1 || num_items <= 1 || !uses_openmp() || is_busy.exchange(true, std::memory_order_acquire)) {
    for (int64_t item = 0; item < num_items; ++item) work(item);
    return;
  }
  const BusyGuard guard;
  static const int registered = pthread_atfork(nullptr, nullptr, forget_threads);
  (void)registered;
  Items items(num_items, num_threads, work);
  find_openmp()([](void* data) { static_cast<Items*>(data)->run_all(); }, &items, static_cast<unsigned>(num_threads),
                0);
}

}  // namespace moeserve
