// The instruction sets of 64-bit ARM, and the variants that kernels are compiled in.
//
// Every processor has NEON. The other instruction sets add few instructions, so most kernels are compiled for NEON
// only.

#pragma once

// Function attributes that enable an instruction set, for inline assembly.
#define MOESERVE_TARGET_NEON_DOT __attribute__((target("arch=armv8.2-a+dotprod")))
#define MOESERVE_TARGET_NEON_BF16 __attribute__((target("arch=armv8.2-a+dotprod+bf16")))

namespace moeserve {

// Each instruction set includes those before it. kNeonDot adds SDOT, which sums four products of bytes, and kNeonBf16
// adds BFDOT, which sums two products of bfloat16.
enum class Isa { kNeon, kNeonDot, kNeonBf16 };

constexpr const char* kIsaNames[] = {"neon", "neon_dot", "neon_bf16"};  // in the order of Isa

}  // namespace moeserve

// Compiles the function template NAME<W>, and defines choose_NAME(isa), which returns its only variant. NAME must be
// MOESERVE_INLINE, as for architectures with several.
#define MOESERVE_DEFINE_VARIANTS(NAME, PARAMETERS, ARGUMENTS) \
  void NAME##_neon PARAMETERS { NAME<4> ARGUMENTS; }          \
  auto choose_##NAME(Isa) { return NAME##_neon; }
