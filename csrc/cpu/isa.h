// The instruction sets that kernels are compiled for, and the choice among them.

#pragma once

#include <string>
#include <vector>

#if defined(__x86_64__)
#define MOESERVE_X86 1
// Function attributes that enable an instruction set, independently of the flags of the file.
#define MOESERVE_TARGET_AVX2 __attribute__((target("avx2,fma")))
#define MOESERVE_TARGET_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))
#define MOESERVE_TARGET_AVX512_BF16 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#endif

namespace moeserve {

enum class Isa { kBaseline, kAvx2, kAvx512, kAvx512Bf16 };

// Return the instruction sets that this machine supports, best first. The baseline is what the compiler flags allow.
const std::vector<Isa>& usable_isas();

// Return the instruction set of the kernels: the best one unless `set_isa` was called. Results may differ between
// instruction sets in the last bits.
Isa current_isa();
void set_isa(Isa isa);

std::string isa_name(Isa isa);

// Throws std::invalid_argument for a name that is unknown or not supported here.
Isa isa_of_name(const std::string& name);

#if defined(MOESERVE_X86)
// Return the variant of a kernel for an instruction set. Without a variant for AVX-512 BF16 the one for AVX-512 is
// used.
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

// Compiles the function template NAME<W> for each instruction set, and defines choose_NAME(isa), which returns the
// variant for one. NAME must be MOESERVE_INLINE, so that its code is generated inside of the variants.
#define MOESERVE_DEFINE_VARIANTS(NAME, PARAMETERS, ARGUMENTS)                  \
  MOESERVE_TARGET_AVX512 void NAME##_avx512 PARAMETERS { NAME<16> ARGUMENTS; } \
  MOESERVE_TARGET_AVX2 void NAME##_avx2 PARAMETERS { NAME<8> ARGUMENTS; }      \
  void NAME##_baseline PARAMETERS { NAME<4> ARGUMENTS; }                       \
  auto choose_##NAME(Isa isa) { return choose_version(isa, NAME##_baseline, NAME##_avx2, NAME##_avx512); }
#else
#define MOESERVE_DEFINE_VARIANTS(NAME, PARAMETERS, ARGUMENTS) \
  void NAME##_baseline PARAMETERS { NAME<4> ARGUMENTS; }      \
  auto choose_##NAME(Isa) { return NAME##_baseline; }
#endif

}  // namespace moeserve
