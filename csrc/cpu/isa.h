// The instruction sets that kernels are compiled for, and which of them this process uses. Knows no kernel.

#pragma once

#include <string>
#include <vector>

#if defined(__x86_64__)
#define MOESERVE_X86 1
// What a function needs so that the compiler may use the instruction set in it, whatever the rest is built for.
#define MOESERVE_TARGET_AVX2 __attribute__((target("avx2,fma")))
#define MOESERVE_TARGET_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))
#define MOESERVE_TARGET_AVX512_BF16 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#endif

namespace moeserve {

enum class Isa { kBaseline, kAvx2, kAvx512, kAvx512Bf16 };

// Those that this machine can run, best first. Baseline is whatever the compiler's own flags allow, and always there.
const std::vector<Isa>& usable_isas();

// The one that kernels run with: the best, unless `set_isa` said otherwise. Results may differ between them in the
// last bits.
Isa current_isa();
void set_isa(Isa isa);

std::string isa_name(Isa isa);

// Throws std::invalid_argument for a name that is unknown or not usable here.
Isa isa_of_name(const std::string& name);

#if defined(MOESERVE_X86)
// Which of a kernel's versions an instruction set runs. Where it has none of its own, it runs that of the one before.
template <typename Kernel>
Kernel choose_version(Isa isa, Kernel baseline, Kernel avx2, Kernel avx512, Kernel avx512_bf16) {
  switch (isa) {
    case Isa::kAvx512Bf16:
      return avx512_bf16;
    case Isa::kAvx512:
      return avx512;
    case Isa::kAvx2:
      return avx2;
    case Isa::kBaseline:
      break;
  }
  return baseline;
}

template <typename Kernel>
Kernel choose_version(Isa isa, Kernel baseline, Kernel avx2, Kernel avx512) {
  return choose_version(isa, baseline, avx2, avx512, avx512);
}
#endif

}  // namespace moeserve
