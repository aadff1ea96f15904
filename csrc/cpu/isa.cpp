// Detection of the instruction sets.

#include "isa.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace moeserve {

namespace {

std::vector<Isa> find_usable() {
  std::vector<Isa> usable;
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) usable.push_back(Isa::kAvx512Bf16);
  if (avx512) usable.push_back(Isa::kAvx512);
  if (avx2) usable.push_back(Isa::kAvx2);

  // MOESERVE_ISA sets an upper limit, so that one machine can test and measure the kernels of others.
  const char* highest = std::getenv("MOESERVE_ISA");
  if (highest == nullptr || *highest == '\0') return usable;
  const auto is_named = [highest](Isa isa) { return isa_name(isa) == highest; };
  const auto first = std::find_if(usable.begin(), usable.end(), is_named);
  if (first == usable.end()) {
    throw std::invalid_argument("MOESERVE_ISA=" + std::string(highest) + " is not supported by this machine");
  }
  return {first, usable.end()};
}

std::atomic<Isa>& chosen() {
  static std::atomic<Isa> isa{usable_isas().empty() ? Isa::kAvx2 : usable_isas().front()};
  return isa;
}

}  // namespace

const std::vector<Isa>& usable_isas() {
  static const std::vector<Isa> usable = find_usable();
  return usable;
}

Isa current_isa() { return chosen().load(std::memory_order_relaxed); }

void set_isa(Isa isa) { chosen().store(isa, std::memory_order_relaxed); }

std::string isa_name(Isa isa) { return choose_version(isa, "avx2", "avx512", "avx512_bf16"); }

Isa isa_of_name(const std::string& name) {
  std::string usable_names;
  for (Isa isa : usable_isas()) {
    if (isa_name(isa) == name) return isa;
    usable_names += (usable_names.empty() ? "" : ", ") + isa_name(isa);
  }
  throw std::invalid_argument("instruction set '" + name + "' is not supported here; supported: " + usable_names);
}

}  // namespace moeserve
