// The instruction sets that kernels are compiled for, and the choice among them. The module is built for x86-64 only.

#pragma once

#include <string>
#include <vector>

// Function attributes that enable an instruction set, independently of the flags of the file.
#define MOESERVE_TARGET_AVX2 __attribute__((target("avx2,fma")))
#define MOESERVE_TARGET_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))
#define MOESERVE_TARGET_AVX512_BF16 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))

namespace moeserve {

// Each instruction set includes those before it. kAvx2Vnni has VPDPBUSD for vectors of 256 bits, kAvx512 and later ones
// for 512 bits.
enum class Isa { kAvx2, kAvx2Vnni, kAvx512, kAvx512Bf16, kAmx };

// Return the instruction sets that this machine supports, best first. Without any, no kernel may be called.
const std::vector<Isa>& usable_isas();

// Return the instruction set of the kernels: the best one unless `set_isa` was called. Results may differ between
// instruction sets in the last bits.
Isa current_isa();
void set_isa(Isa isa);

std::string isa_name(Isa isa);

// Throws std::invalid_argument for a name that is unknown or not supported here.
Isa isa_of_name(const std::string& name);

// Return the variant of a kernel for an instruction set.
template <typename Kernel>
Kernel choose_version(Isa isa, Kernel avx2, Kernel avx512, Kernel avx512_bf16) {
  return isa < Isa::kAvx512 ? avx2 : isa == Isa::kAvx512 ? avx512 : avx512_bf16;
}

// Compiles the function template NAME<W> for each instruction set, and defines choose_NAME(isa), which returns the
// variant for one. AVX-512 BF16 has none of its own. NAME must be MOESERVE_INLINE, so that its code is generated inside
// of the variants.
#define MOESERVE_DEFINE_VARIANTS(NAME, PARAMETERS, ARGUMENTS)                  \
  MOESERVE_TARGET_AVX512 void NAME##_avx512 PARAMETERS { NAME<16> ARGUMENTS; } \
  MOESERVE_TARGET_AVX2 void NAME##_avx2 PARAMETERS { NAME<8> ARGUMENTS; }      \
  auto choose_##NAME(Isa isa) { return choose_version(isa, NAME##_avx2, NAME##_avx512, NAME##_avx512); }

// The same for a template NAME<W, Element>, with Element as TYPE says: float32 or bfloat16.
#define MOESERVE_DEFINE_TYPED_VARIANTS(NAME, TYPE, PARAMETERS, ARGUMENTS)                    \
  template <int W>                                                                           \
  MOESERVE_INLINE void NAME##_of_type PARAMETERS {                                           \
    TYPE == ElementType::kBFloat16 ? NAME<W, BFloat16> ARGUMENTS : NAME<W, float> ARGUMENTS; \
  }                                                                                          \
  MOESERVE_DEFINE_VARIANTS(NAME##_of_type, PARAMETERS, ARGUMENTS)

}  // namespace moeserve
