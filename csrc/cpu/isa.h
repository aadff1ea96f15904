// The instruction sets that kernels are compiled for, and the choice among them.
//
// What depends on the architecture of the processor is in x86_64/ and arm64/, of which the build uses one: it compiles
// the sources and finds the headers there. Both have headers of the same names.

#pragma once

#include <string>
#include <vector>

#include "target.h"

namespace moeserve {

// Return the instruction sets that this machine supports, best first. Without any, no kernel may be called.
const std::vector<Isa>& usable_isas();

// The same, regardless of the limit that is set in the environment.
std::vector<Isa> detect_isas();

// Return the instruction set of the kernels: the best one unless `set_isa` was called. Results may differ between
// instruction sets in the last bits.
Isa current_isa();
void set_isa(Isa isa);

std::string isa_name(Isa isa);

// Throws std::invalid_argument for a name that is unknown or not supported here.
Isa isa_of_name(const std::string& name);

// Like MOESERVE_DEFINE_VARIANTS, for a template NAME<W, Element>, with Element as TYPE says: float32 or bfloat16.
#define MOESERVE_DEFINE_TYPED_VARIANTS(NAME, TYPE, PARAMETERS, ARGUMENTS)                    \
  template <int W>                                                                           \
  MOESERVE_INLINE void NAME##_of_type PARAMETERS {                                           \
    TYPE == ElementType::kBFloat16 ? NAME<W, BFloat16> ARGUMENTS : NAME<W, float> ARGUMENTS; \
  }                                                                                          \
  MOESERVE_DEFINE_VARIANTS(NAME##_of_type, PARAMETERS, ARGUMENTS)

}  // namespace moeserve
