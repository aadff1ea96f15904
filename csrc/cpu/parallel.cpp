// Choice between the OpenMP threads of torch and a pool of our own.

#include "parallel.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>

#include "thread_pool.h"

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
ThreadPool* own_pool = nullptr;  // guarded by `is_busy`; never destroyed, so that exit cannot hang

// Runs in the child of a fork: the threads of both kinds do not exist there, and their state must not be touched.
void forget_threads() {
  is_forked = true;
  is_busy = false;
  own_pool = nullptr;
}

struct BusyGuard {
  ~BusyGuard() { is_busy.store(false, std::memory_order_release); }
};

ThreadPool& pool_of(int num_threads) {
  if (own_pool == nullptr || own_pool->num_workers() != num_threads - 1) {
    delete own_pool;
    own_pool = nullptr;
    auto fresh = std::make_unique<ThreadPool>();
    fresh->start(num_threads - 1);
    own_pool = fresh.release();
  }
  return *own_pool;
}

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
  if (num_threads == 1 || num_items <= 1 || is_busy.exchange(true, std::memory_order_acquire)) {
    for (int64_t item = 0; item < num_items; ++item) work(item);
    return;
  }
  const BusyGuard guard;
  static const int registered = pthread_atfork(nullptr, nullptr, forget_threads);
  (void)registered;
  Items items(num_items, num_threads, work);
  if (uses_openmp()) {
    find_openmp()([](void* data) { static_cast<Items*>(data)->run_all(); }, &items, static_cast<unsigned>(num_threads),
                  0);
  } else {
    pool_of(num_threads).run(items);
  }
}

}  // namespace moeserve
