// The Python module moeserve._cpu. Its functions check their arguments, raising ValueError, release the GIL and run a
// kernel. On a processor without kernels it has the collectives in shared memory alone.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bindings.h"
#include "cpu_graph.h"

#if defined(MOESERVE_HAS_KERNELS)
#include "cpu/isa.h"
#include "cpu/parallel.h"
#endif

namespace nb = nanobind;

namespace moeserve {

namespace {

// Return none where the module was built without kernels.
std::vector<std::string> usable_isa_names() {
  std::vector<std::string> names;
#if defined(MOESERVE_HAS_KERNELS)
  for (Isa isa : usable_isas()) names.push_back(isa_name(isa));
#endif
  return names;
}

}  // namespace

}  // namespace moeserve

NB_MODULE(_cpu, module) {
  using namespace nb::literals;
  // A daemon thread of the program keeps the modules that it uses, and functions of this one, when Python has ended.
  // These are no leaks, so they are reported only in Python's development mode (`-X dev`).
  nb::set_leak_warnings(nb::cast<bool>(nb::module_::import_("sys").attr("flags").attr("dev_mode")));
  module.doc() = "C++ kernels of moeserve for CPUs, and shared memory between ranks.";
  moeserve::bind_shared_memory(module);
  moeserve::bind_cpu_graph(module);
  moeserve::bind_progress(module);
  module.def("usable_isas", &moeserve::usable_isa_names,
             "Return the instruction sets that this machine supports, best first.");

#if defined(MOESERVE_HAS_KERNELS)
  moeserve::bind_attention(module);
  moeserve::bind_compressed_attention(module);
  moeserve::bind_expert_store(module);
  moeserve::bind_indexer(module);
  moeserve::bind_layers(module);
  moeserve::bind_limits(module);
  moeserve::bind_mixing(module);
  moeserve::bind_products(module);
  moeserve::bind_recurrent(module);
  module.def("set_num_threads", &moeserve::set_num_threads, "num_threads"_a,
             "Set the number of threads that kernels use.");
  module.def("num_threads", &moeserve::num_threads, "Return the number of threads that kernels use.");
  module.def(
      "isa", [] { return moeserve::isa_name(moeserve::current_isa()); },
      "Return the instruction set that kernels use.");
  module.def(
      "set_isa", [](const std::string& name) { moeserve::set_isa(moeserve::isa_of_name(name)); }, "name"_a,
      "Select one of `usable_isas()`, for tests and benchmarks.");
#endif
}
