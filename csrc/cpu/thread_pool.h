// The threads that C++ kernels run on: one pool per process. Knows no kernel.
//
// It stands beside torch's own pool, never inside it: a kernel and a torch operator do not run at the same time in one
// rank, and a second OpenMP runtime would keep its threads spinning while torch's want the cores.

#pragma once

#include <cstdint>
#include <functional>

namespace moeserve {

// Threads that `parallel_for` may use, the calling one included. 1 until set. Threads are started by the first call
// that wants them, and stopped by the next one that wants another number. Throws std::invalid_argument below 1.
void set_num_threads(int num_threads);
int num_threads();

// Calls work(item) once for every item in [0, num_items), on at most `max_threads` threads, and returns when all are
// done. Whoever is free takes the next item, so which thread runs an item says nothing. `work` must not throw.
//
// - With one thread, one item, or while another call is in progress (from an item, or from another thread), all items
//   run on the calling thread.
// - The caller waits for items, not for threads: one that the system wakes late finds the work done by others.
// - After a fork the child starts threads of its own.
// - Threads sleep between calls and are never joined at exit: nothing can hang there.
void parallel_for(int64_t num_items, int max_threads, const std::function<void(int64_t)>& work);

}  // namespace moeserve
