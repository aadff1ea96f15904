// The instruction sets of x86-64, and the variants of kernels that are compiled.

#pragma once

// Function attributes that enable an instruction set, independently of the flags of the file.
#define MOESERVE_TARGET_AVX2 __attribute__((target("avx2,fma")))
#define MOESERVE_TARGET_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))
#define MOESERVE_TARGET_AVX512_BF16 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))

namespace moeserve {

// Each instruction set includes those before it. kAvx2Vnni adds VPDPBUSD for 256-bit vectors; kAvx512 and later sets
// have it for 512-bit vectors.
enum class Isa { kAvx2, kAvx2Vnni, kAvx512, kAvx512Bf16, kAmx };

constexpr const char* kIsaNames[] = {"avx2", "avx2_vnni", "avx512", "avx512_bf16", "amx"};  // in the order of Isa

}  // namespace moeserve

// Compile the function template NAME<W> for each vector width, and define choose_NAME(isa), which returns the variant
// for an instruction set. NAME must be MOESERVE_INLINE, so that its code is generated inside of the variants.
#define MOESERVE_DEFINE_VARIANTS(NAME, PARAMETERS, ARGUMENTS)                  \
  MOESERVE_TARGET_AVX512 void NAME##_avx512 PARAMETERS { NAME<16> ARGUMENTS; } \
  MOESERVE_TARGET_AVX2 void NAME##_avx2 PARAMETERS { NAME<8> ARGUMENTS; }      \
  auto choose_##NAME(Isa isa) { return isa < Isa::kAvx512 ? NAME##_avx2 : NAME##_avx512; }
