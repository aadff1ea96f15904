// The instruction sets that kernels are compiled for, and the choice among them.
//
// Code that depends on the processor's architecture is in x86_64/ and arm64/. The build compiles the sources of one of
// them, and finds its headers, which have the same names in both.

#pragma once

#include <string>
#include <vector>

#include "target.h"

namespace moeserve {

// Return the instruction sets that this machine supports, best first. Without any, no kernel may be called.
const std::vector<Isa>& usable_isas();

// Return the same instruction sets, but without the limit in the environment.
std::vector<Isa> detect_isas();

// Return the instruction set of the kernels: the best one, unless `set_isa` has been called. The last bits of results
// may differ between instruction sets.
Isa current_isa();
void set_isa(Isa isa);

std::string isa_name(Isa isa);

// Throws std::invalid_argument for a name that is unknown or not supported here.
Isa isa_of_name(const std::string& name);

// Like MOESERVE_DEFINE_VARIANTS, for a template NAME<W, Element>. TYPE selects the element: float32 or bfloat16.
#define MOESERVE_DEFINE_TYPED_VARIANTS(NAME, TYPE, PARAMETERS, ARGUMENTS)                    \
  template <int W>                                                                           \
  MOESERVE_INLINE void NAME##_of_type PARAMETERS {                                           \
    TYPE == ElementType::kBFloat16 ? NAME<W, BFloat16> ARGUMENTS : NAME<W, float> ARGUMENTS; \
  }                                                                                          \
  MOESERVE_DEFINE_VARIANTS(NAME##_of_type, PARAMETERS, ARGUMENTS)

}  // namespace moeserve
