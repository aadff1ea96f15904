// Bindings of the collectives in shared memory. The caller, moeserve.distributed, checks the sizes.

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstdint>
#include <utility>
#include <vector>

#include "arguments.h"
#include "bindings.h"
#include "cpu_graph.h"
#include "host/shared_memory.h"

namespace nb = nanobind;

namespace moeserve {

namespace {

std::vector<int64_t> scaled(std::vector<int64_t> sizes, int64_t factor) {
  for (int64_t& size : sizes) size *= factor;
  return sizes;
}

const char* source_of(const Tensor& tensor) { return static_cast<const char*>(tensor.data); }
char* target_of(const Tensor& tensor) { return static_cast<char*>(tensor.data); }

// Begin an operation and return its number. During capture it is a stand-in for those of the replays.
template <typename Begin>
uint64_t begin(SharedMemory& memory, const Begin& begin_operation) {
  if (CpuGraph* graph = capturing_cpu_graph()) {
    const uint64_t stand_in = graph->add_number();
    graph->keep(nb::find(memory));
    graph->add([begin_operation, number = graph->number(stand_in)] { *number = begin_operation(); });
    return stand_in;
  }
  const nb::gil_scoped_release released;
  return begin_operation();
}

// Wait without the GIL and return the outcome. Signal handlers run meanwhile and may raise; the operation continues in
// this case.
Outcome wait_with_signals(SharedMemory& memory, uint64_t number, double timeout_s, bool is_measured) {
  using Clock = std::chrono::steady_clock;
  const auto started = Clock::now();
  double remaining_s = timeout_s;
  while (true) {
    const Outcome outcome = memory.wait(number, remaining_s, is_measured);
    if (outcome != Outcome::kInterrupted) return outcome;
    {
      const nb::gil_scoped_acquire acquired;
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
    remaining_s = timeout_s - std::chrono::duration<double>(Clock::now() - started).count();
  }
}

// Return the outcome as a number: 0 on success, and during capture.
int wait(SharedMemory& memory, uint64_t number, double timeout_s, bool is_measured) {
  if (CpuGraph* graph = capturing_cpu_graph()) {
    graph->add([&memory, number = graph->number(number), timeout_s, is_measured] {
      const Outcome outcome = wait_with_signals(memory, *number, timeout_s, is_measured);
      if (outcome != Outcome::kDone) throw ReplayedCallFailed{static_cast<int>(outcome)};
    });
    return static_cast<int>(Outcome::kDone);
  }
  const nb::gil_scoped_release released;
  return static_cast<int>(wait_with_signals(memory, number, timeout_s, is_measured));
}

}  // namespace

void bind_shared_memory(nb::module_& module) {
  using namespace nb::literals;
  using Sizes = std::vector<int64_t>;
  nb::class_<SharedMemory>(module, "SharedMemory", "The membership of one rank in a group of processes on one host.")
      .def(
          "__init__",
          [](SharedMemory* self, int rank, const std::vector<int>& memory_fds, const std::vector<int>& sockets,
             int64_t num_slots, int64_t slot_bytes, double spin_s,
             bool naps) { new (self) SharedMemory(rank, memory_fds, sockets, {num_slots, slot_bytes}, spin_s, naps); },
          "rank"_a, "memory_fds"_a, "sockets"_a, nb::kw_only(), "num_slots"_a, "slot_bytes"_a, "spin_s"_a, "naps"_a,
          "Map the memory of each rank. The socket to each other rank detects its death; the own entry is -1. naps: "
          "sleep as on a system on which processes cannot sleep on a shared word; for tests.")
      .def_static(
          "num_bytes",
          [](int num_ranks, int64_t num_slots, int64_t slot_bytes) {
            return SharedMemory::num_bytes(num_ranks, {num_slots, slot_bytes});
          },
          "num_ranks"_a, nb::kw_only(), "num_slots"_a, "slot_bytes"_a, "Return the bytes of the memory of each rank.")
      .def(
          "begin_exchange",
          [](SharedMemory& self, const Tensor& sent, Sizes send_sizes, const Tensor& received, Sizes receive_sizes,
             int64_t row_bytes) {
            const Sizes send_bytes = scaled(std::move(send_sizes), row_bytes);
            const Sizes receive_bytes = scaled(std::move(receive_sizes), row_bytes);
            return begin(self, [&self, sent, send_bytes, received, receive_bytes] {
              return self.begin_exchange(source_of(sent), send_bytes, target_of(received), receive_bytes);
            });
          },
          "sent"_a, "send_sizes"_a, "received"_a, "receive_sizes"_a, "row_bytes"_a,
          "All-to-all: send and receive the given number of rows per rank. Return the number of the operation.")
      .def(
          "begin_gather",
          [](SharedMemory& self, const Tensor& sent, const Tensor& received, Sizes sizes, int64_t row_bytes) {
            const Sizes bytes = scaled(std::move(sizes), row_bytes);
            return begin(self, [&self, sent, received, bytes] {
              return self.begin_gather(source_of(sent), target_of(received), bytes);
            });
          },
          "sent"_a, "received"_a, "sizes"_a, "row_bytes"_a,
          "All-gather of the given number of rows per rank. Return the number of the operation.")
      .def(
          "begin_sum_of_parts",
          [](SharedMemory& self, const Tensor& sent, const Tensor& out, Sizes sizes, int64_t row_bytes) {
            const Sizes bytes = scaled(std::move(sizes), row_bytes);
            check_float_type("sent", sent);
            check_float_type("out", out);
            return begin(self, [&self, sent, out, bytes] {
              return self.begin_sum_of_parts(sent.type, source_of(sent), out.type, target_of(out), bytes);
            });
          },
          "sent"_a, "out"_a, "sizes"_a, "row_bytes"_a,
          "Reduce-scatter of the given number of rows per rank. Return the number of the operation.")
      .def("wait", &wait, "number"_a, "timeout_s"_a, "is_measured"_a = true,
           "Wait for an operation. Return 0 on success, otherwise the outcome.")
      .def("begin_step", &SharedMemory::begin_step, "Restart the index of operations that `seconds_waited` uses.")
      .def("seconds_waited", &SharedMemory::seconds_waited,
           "Return the seconds of measured waits by index of the operation in its step.")
      .def("absent", &SharedMemory::absent, "Return the ranks that caused the last failure.")
      .def("close", &SharedMemory::close, nb::call_guard<nb::gil_scoped_release>(),
           "Leave the group. Ranks that wait for this rank fail.");
}

}  // namespace moeserve
