// Sums of rows from several ranks.

#pragma once

#include <cstdint>
#include <vector>

#include "cpu/element_type.h"

namespace moeserve {

// Compute out = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ..., added in float32 and rounded once. The last
// parts may lack a neighbour. `num_bytes` is the size of a part; `out` may be one of the parts if both types are equal.
// Types are bfloat16 and float32. For instruction sets in `usable_isas()` only.
void add_in_tree(ElementType element, const std::vector<const char*>& parts, ElementType out_element, char* out,
                 int64_t num_bytes);

}  // namespace moeserve
