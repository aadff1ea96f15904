// The instruction sets of x86-64, and the variants that kernels are compiled in.

#pragma once

// Function attributes that enable an instruction set, independently of the flags of the file.
#define MOESERVE_TARGET_AVX2 __attribute__((target("avx2,fma")))
#define MOESERVE_TARGET_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))
#define MOESERVE_TARGET_AVX512_BF16 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))

namespace moeserve {

// Each instruction set includes those before it. kAvx2Vnni has VPDPBUSD for vectors of 256 bits, kAvx512 and later ones
// for 512 bits.
enum class Isa { kAvx2, kAvx2Vnni, kAvx512, kAvx512Bf16, kAmx };

constexpr const char* kIsaNames[] = {"avx2", "avx2_vnni", "avx512", "avx512_bf16", "amx"};  // in the order of Isa

}  // namespace moeserve

// Compiles the function template NAME<W> for each width of vectors, and defines choose_NAME(isa), which returns the
// variant for an instruction set. NAME must be MOESERVE_INLINE, so that its code is generated inside of the variants.
#define MOESERVE_DEFINE_VARIANTS(NAME, PARAMETERS, ARGUMENTS)                  \
  MOESERVE_TARGET_AVX512 void NAME##_avx512 PARAMETERS { NAME<16> ARGUMENTS; } \
  MOESERVE_TARGET_AVX2 void NAME##_avx2 PARAMETERS { NAME<8> ARGUMENTS; }      \
  auto choose_##NAME(Isa isa) { return isa < Isa::kAvx512 ? NAME##_avx2 : NAME##_avx512; }
