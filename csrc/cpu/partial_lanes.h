// Vectors of which only some lanes are used, for the ends of rows.

#pragma once

#include <cstdint>

#include "lanes.h"
#include "rows.h"

namespace moeserve {

// Load `count` <= W elements in order; the other lanes are zero.
template <int W, typename Element>
MOESERVE_INLINE Float<W> load_lanes(const Element* source, int64_t count) {
  if (count == W) return load_in_order<W>(source);
  Element elements[W] = {};
  for (int64_t i = 0; i < count; ++i) elements[i] = source[i];
  return load_in_order<W>(elements);
}

template <int W, typename Element>
MOESERVE_INLINE void store_lanes(Element* target, Float<W> lanes, int64_t count) {
  if (count == W) return store_in_order<W>(target, lanes);
  Element elements[W];
  store_in_order<W>(elements, lanes);
  for (int64_t i = 0; i < count; ++i) target[i] = elements[i];
}

template <int W>
MOESERVE_INLINE Float<W> silu(Float<W> x) {
  return x * sigmoid<W>(x);
}

}  // namespace moeserve
