// The Python module moeserve._cpu: kernels that check what they are given, let go of the interpreter, and run.
//
// A wrong argument raises ValueError.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bindings.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "cpu_graph.h"

namespace nb = nanobind;

namespace moeserve {

namespace {

std::vector<std::string> usable_isa_names() {
  std::vector<std::string> names;
  for (Isa isa : usable_isas()) names.push_back(isa_name(isa));
  return names;
}

}  // namespace

}  // namespace moeserve

NB_MODULE(_cpu, module) {
  using namespace nb::literals;
  module.doc() = "C++ kernels of moeserve for CPUs. Called by moeserve.ops only.";
  moeserve::bind_shared_memory(module);

  moeserve::bind_attention(module);
  moeserve::bind_layers(module);
  moeserve::bind_products(module);
  moeserve::bind_cpu_graph(module);

  module.def("set_num_threads", &moeserve::set_num_threads, "num_threads"_a, "Threads that kernels may use.");
  module.def("num_threads", &moeserve::num_threads);
  module.def("uses_openmp", &moeserve::uses_openmp, "Whether these are torch's OpenMP threads, or a pool of our own.");
  module.def(
      "isa", [] { return moeserve::isa_name(moeserve::current_isa()); }, "The instruction set that kernels run with.");
  module.def("usable_isas", &moeserve::usable_isa_names, "Those that this machine can run, best first.");
  module.def(
      "set_isa", [](const std::string& name) { moeserve::set_isa(moeserve::isa_of_name(name)); }, "name"_a,
      "Makes kernels run with one of `usable_isas()`; for tests and benchmarks.");
}
