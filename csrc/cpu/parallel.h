// Parallel execution of the items of a kernel.

#pragma once

#include <cstdint>
#include <functional>

namespace moeserve {

// The number of threads of `parallel_for`, including the calling one. Initially 1. Throws std::invalid_argument below
// 1.
void set_num_threads(int num_threads);
int num_threads();

// Call work(item) once for every item in [0, num_items), and return when all calls have returned. The assignment of
// items to threads is not deterministic. `work` must not throw.
//
// All items run on the calling thread if there is one thread or one item, or while another call is in progress (from an
// item or from another thread). Otherwise a team of `num_threads` threads takes them, as far as its threads have cores:
// the caller waits for no thread that has not begun an item. Between calls the threads stay awake for a moment, then
// sleep.
void parallel_for(int64_t num_items, const std::function<void(int64_t)>& work);

}  // namespace moeserve
