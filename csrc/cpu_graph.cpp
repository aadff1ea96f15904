// The graph that a thread captures, replay, and the Python class CpuGraph.

#include "cpu_graph.h"

#include <string>

namespace nb = nanobind;

namespace moeserve {

namespace {

thread_local CpuGraph* cpu_graph_of_this_thread = nullptr;

}  // namespace

CpuGraph* capturing_cpu_graph() { return cpu_graph_of_this_thread; }

void CpuGraph::begin_capture() {
  if (cpu_graph_of_this_thread != nullptr) throw std::logic_error("this thread is capturing a graph already");
  cpu_graph_of_this_thread = this;
}

void CpuGraph::end_capture() {
  if (cpu_graph_of_this_thread == this) cpu_graph_of_this_thread = nullptr;
}

void CpuGraph::replay() const {
  if (cpu_graph_of_this_thread != nullptr) throw std::logic_error("this thread is capturing a graph");
  size_t num_started = 0;
  int outcome = 0;
  {
    const nb::gil_scoped_release released;
    try {
      for (const std::function<void()>& call : calls_) {
        ++num_started;
        call();
      }
      return;
    } catch (const ReplayedCallFailed& failure) {
      outcome = failure.outcome;
    }
  }
  const auto handler = handlers_.find(num_started);
  if (handler != handlers_.end()) handler->second(outcome);
  throw std::runtime_error("captured call " + std::to_string(num_started) + " failed: " + std::to_string(outcome));
}

void bind_cpu_graph(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<CpuGraph>(module, "CpuGraph", "Captures the kernel calls of the current thread and replays them.")
      .def(nb::init<uintptr_t, size_t>(), "address"_a = 0, "num_bytes"_a = 0,
           "Tensors whose memory begins in [address, address + num_bytes) are not kept alive.")
      .def("begin_capture", &CpuGraph::begin_capture, "Start capturing: calls are recorded and not executed.")
      .def("end_capture", &CpuGraph::end_capture, "Stop capturing.")
      .def("replay", &CpuGraph::replay, "Execute all captured calls again on the same memory.")
      .def_prop_ro("num_calls", &CpuGraph::num_calls, "Number of captured calls.");
  module.def(
      "is_capturing", [] { return capturing_cpu_graph() != nullptr; },
      "Return True if the current thread is capturing a graph.");
  module.def(
      "on_replay_failure",
      [](nb::object handler) {
        if (CpuGraph* graph = capturing_cpu_graph()) graph->set_handler(std::move(handler));
      },
      "handler"_a,
      "Call `handler` with the outcome if the last captured call fails during replay. The handler raises the error. "
      "Without effect outside of capture.");
}

}  // namespace moeserve
