// Python's view of the shared memory between ranks. Buffers come as addresses: what is sent is small and often, and
// reading a tensor through DLPack takes longer than sending it. Called by moeserve.distributed only, which checks
// sizes.

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstdint>
#include <vector>

#include "bindings.h"
#include "host/shared_memory.h"

namespace nb = nanobind;

namespace moeserve {

#if defined(__linux__)

namespace {

const char* source_at(uintptr_t address) { return reinterpret_cast<const char*>(address); }
char* target_at(uintptr_t address) { return reinterpret_cast<char*>(address); }

std::vector<int64_t> times(std::vector<int64_t> sizes, int64_t factor) {
  for (int64_t& size : sizes) size *= factor;
  return sizes;
}

// The outcome as a number: 0 when all went well. Signals are handled meanwhile, so this may raise what their handlers
// do; the operation goes on then.
int wait(SharedMemory& memory, uint64_t number, double timeout_s) {
  using Clock = std::chrono::steady_clock;
  const auto started = Clock::now();
  double left_s = timeout_s;
  while (true) {
    Outcome outcome;
    {
      const nb::gil_scoped_release released;
      outcome = memory.wait(number, left_s);
    }
    if (outcome != Outcome::kInterrupted) return static_cast<int>(outcome);
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    left_s = timeout_s - std::chrono::duration<double>(Clock::now() - started).count();
  }
}

}  // namespace

void bind_shared_memory(nb::module_& module) {
  using namespace nb::literals;
  using Sizes = std::vector<int64_t>;
  nb::class_<SharedMemory>(module, "SharedMemory", "One rank's membership of a group on one host.")
      .def(
          "__init__",
          [](SharedMemory* self, int rank, const std::vector<int>& memory_fds, const std::vector<int>& sockets,
             int64_t num_slots, int64_t slot_bytes,
             double spin_s) { new (self) SharedMemory(rank, memory_fds, sockets, {num_slots, slot_bytes}, spin_s); },
          "rank"_a, "memory_fds"_a, "sockets"_a, nb::kw_only(), "num_slots"_a, "slot_bytes"_a, "spin_s"_a,
          "Maps the memory of each rank. A socket to each other rank says when it has died; own: -1.")
      .def_static(
          "num_bytes",
          [](int num_ranks, int64_t num_slots, int64_t slot_bytes) {
            return SharedMemory::num_bytes(num_ranks, {num_slots, slot_bytes});
          },
          "num_ranks"_a, nb::kw_only(), "num_slots"_a, "slot_bytes"_a, "Of each rank's memory.")
      .def(
          "begin_exchange",
          [](SharedMemory& self, uintptr_t sent, Sizes send_sizes, uintptr_t received, Sizes receive_sizes,
             int64_t row_bytes) {
            send_sizes = times(std::move(send_sizes), row_bytes);
            receive_sizes = times(std::move(receive_sizes), row_bytes);
            const nb::gil_scoped_release released;
            return self.begin_exchange(source_at(sent), send_sizes, target_at(received), receive_sizes);
          },
          "sent"_a, "send_sizes"_a, "received"_a, "receive_sizes"_a, "row_bytes"_a)
      .def(
          "begin_gather",
          [](SharedMemory& self, uintptr_t sent, uintptr_t received, Sizes sizes, int64_t row_bytes) {
            sizes = times(std::move(sizes), row_bytes);
            const nb::gil_scoped_release released;
            return self.begin_gather(source_at(sent), target_at(received), sizes);
          },
          "sent"_a, "received"_a, "sizes"_a, "row_bytes"_a)
      .def(
          "begin_sum_of_parts",
          [](SharedMemory& self, int element, uintptr_t sent, uintptr_t out, Sizes sizes, int64_t row_bytes) {
            sizes = times(std::move(sizes), row_bytes);
            const nb::gil_scoped_release released;
            return self.begin_sum_of_parts(static_cast<Element>(element), source_at(sent), target_at(out), sizes);
          },
          "element"_a, "sent"_a, "out"_a, "sizes"_a, "row_bytes"_a)
      .def(
          "begin_sum",
          [](SharedMemory& self, int element, uintptr_t sent, uintptr_t out, int64_t num_bytes) {
            const nb::gil_scoped_release released;
            return self.begin_sum(static_cast<Element>(element), source_at(sent), target_at(out), num_bytes);
          },
          "element"_a, "sent"_a, "out"_a, "num_bytes"_a)
      .def("wait", &wait, "number"_a, "timeout_s"_a)
      .def("absent", &SharedMemory::absent)
      .def("close", &SharedMemory::close, nb::call_guard<nb::gil_scoped_release>());
}

#else

void bind_shared_memory(nb::module_&) {}  // futexes and memfds are Linux'

#endif

}  // namespace moeserve
