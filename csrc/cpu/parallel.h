// Runs the items of a kernel on several threads. Knows no kernel.

#pragma once

#include <cstdint>
#include <functional>

namespace moeserve {

// Threads that `parallel_for` uses, the calling one included. 1 until set. Throws std::invalid_argument below 1.
void set_num_threads(int num_threads);
int num_threads();

// Calls work(item) once for every item in [0, num_items) and returns when all are done. Each thread begins with a range
// of its own and then helps the others, so which thread runs an item says nothing. `work` must not throw.
//
// - With one thread or one item, or while another call is in progress (from an item, or from another thread), all items
//   run on the calling thread.
// - Where torch has loaded an OpenMP runtime, its threads are used: they wait for work by spinning, and threads of our
//   own would have to fight them for the cores. They are expected to be as many as `num_threads`.
// - Elsewhere, and in the child of a fork, which has none of these threads, a pool of our own is used.
void parallel_for(int64_t num_items, const std::function<void(int64_t)>& work);

// Whether it is OpenMP's threads that are used.
bool uses_openmp();

}  // namespace moeserve
