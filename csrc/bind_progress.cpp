// Bindings of the progress record of this process.

#include <nanobind/nanobind.h>

#include <cstdint>

#include "bindings.h"
#include "cpu_graph.h"
#include "host/progress_record.h"

namespace nb = nanobind;

namespace moeserve {

void bind_progress(nb::module_& module) {
  using namespace nb::literals;
  module.def(
      "attach_progress", &attach_progress, "fd"_a, "index"_a,
      "Write the progress of this process to a record of 64 bytes in a file, and heartbeats ten times a second.");
  module.def(
      "begin_round",
      [](uint64_t round) {
        progress_record().layer.store(0, std::memory_order_relaxed);
        progress_record().round.store(round, std::memory_order_relaxed);
      },
      "round"_a, "Record that this rank begins a round.");
  module.def(
      "begin_layer",
      [](uint32_t layer) {
        const auto begin = [layer] { progress_record().layer.store(layer, std::memory_order_relaxed); };
        if (CpuGraph* graph = capturing_cpu_graph()) {
          graph->add(begin);
        } else {
          begin();
        }
      },
      "layer"_a, "Record that this rank begins a layer, counted from 1. A replayed graph records it as well.");
  module.def(
      "set_phase", [](uint32_t phase) { return progress_record().phase.exchange(phase, std::memory_order_relaxed); },
      "phase"_a, "Record what this rank does, and return what it did.");
  module.def(
      "begin_epoch", [](uint64_t epoch) { progress_record().epoch.store(epoch, std::memory_order_relaxed); }, "epoch"_a,
      "Record the epoch of the connections that this rank uses.");
}

}  // namespace moeserve
