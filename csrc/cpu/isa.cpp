// The choice of an instruction set.

#include "isa.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace moeserve {

namespace {

// MOESERVE_ISA sets an upper limit, so that one machine can test and measure the kernels for older processors.
std::vector<Isa> find_usable() {
  const std::vector<Isa> supported = detect_isas();
  const char* highest = std::getenv("MOESERVE_ISA");
  if (highest == nullptr || *highest == '\0') return supported;
  const auto is_named = [highest](Isa isa) { return isa_name(isa) == highest; };
  const auto first = std::find_if(supported.begin(), supported.end(), is_named);
  if (first == supported.end()) {
    std::string names;
    for (Isa isa : supported) names += (names.empty() ? "" : ", ") + isa_name(isa);
    throw std::invalid_argument("MOESERVE_ISA=" + std::string(highest) +
                                " is no instruction set that this processor has kernels for; it has " + names);
  }
  return {first, supported.end()};
}

std::atomic<Isa>& chosen() {
  static std::atomic<Isa> isa{usable_isas().empty() ? Isa{} : usable_isas().front()};
  return isa;
}

}  // namespace

const std::vector<Isa>& usable_isas() {
  static const std::vector<Isa> usable = find_usable();
  return usable;
}

Isa current_isa() { return chosen().load(std::memory_order_relaxed); }

void set_isa(Isa isa) { chosen().store(isa, std::memory_order_relaxed); }

std::string isa_name(Isa isa) { return kIsaNames[static_cast<int>(isa)]; }

Isa isa_of_name(const std::string& name) {
  std::string usable_names;
  for (Isa isa : usable_isas()) {
    if (isa_name(isa) == name) return isa;
    usable_names += (usable_names.empty() ? "" : ", ") + isa_name(isa);
  }
  throw std::invalid_argument("instruction set '" + name + "' is not supported here; supported: " + usable_names);
}

}  // namespace moeserve
