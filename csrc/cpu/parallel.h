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
// All items run on the calling thread if there is one thread or one item, while another call is in progress (from an
// item or from another thread), in the child of a fork, or if torch has not loaded an OpenMP runtime. Otherwise the
// threads of torch's OpenMP runtime are used. They spin while they wait, so any other threads would compete with them
// for the cores. Their number is expected to be `num_threads`.
void parallel_for(int64_t num_items, const std::function<void(int64_t)>& work);

// Return true if the OpenMP threads are used.
bool uses_openmp();

}  // namespace moeserve
