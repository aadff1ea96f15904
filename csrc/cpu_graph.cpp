// Which graph records, and graphs as Python sees them.

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
  size_t num_made = 0;
  int outcome = 0;
  {
    const nb::gil_scoped_release released;
    try {
      for (const std::function<void()>& call : calls_) {
        ++num_made;
        call();
      }
      return;
    } catch (const ReplayedCallFailed& failure) {
      outcome = failure.outcome;
    }
  }
  const auto handler = handlers_.find(num_made);
  if (handler != handlers_.end()) handler->second(outcome);
  throw std::runtime_error("recorded call " + std::to_string(num_made) + " failed: " + std::to_string(outcome));
}

void bind_cpu_graph(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<CpuGraph>(module, "CpuGraph", "Records the calls of kernels that this thread makes, to make them again.")
      .def(nb::init<uintptr_t, size_t>(), "address"_a = 0, "num_bytes"_a = 0,
           "Tensors whose memory begins in a range of addresses are not kept alive.")
      .def("begin_capture", &CpuGraph::begin_capture, "Begins to record. The calls are made as well.")
      .def("end_capture", &CpuGraph::end_capture)
      .def("replay", &CpuGraph::replay, "Makes all calls again, in the memory of the tensors that they were made with.")
      .def_prop_ro("num_calls", &CpuGraph::num_calls);
  module.def("is_capturing", [] { return capturing_cpu_graph() != nullptr; }, "Whether this thread records.");
  module.def(
      "on_replay_failure",
      [](nb::object handler) {
        if (CpuGraph* graph = capturing_cpu_graph()) graph->set_handler(std::move(handler));
      },
      "handler"_a,
      "If this thread records: where the call recorded last fails when it is played, `handler` gets its outcome, and "
      "raises.");
}

}  // namespace moeserve
