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

// Return log(1 + e^x), within a few units in the last place.
template <int W>
MOESERVE_INLINE Float<W> softplus(Float<W> x) {
  const Float<W> power = exp_of_nonpositive<W>(x > 0.0f ? -x : x);
  // log(1 + p) = 2 atanh(p / (2 + p)), with an argument of at most 1 / 3. The first omitted term is below 1e-9.
  const Float<W> s = power / (2.0f + power);
  const Float<W> square = s * s;
  Float<W> series = square * (1.0f / 15) + (1.0f / 13);
  series = series * square + (1.0f / 11);
  series = series * square + (1.0f / 9);
  series = series * square + (1.0f / 7);
  series = series * square + (1.0f / 5);
  series = series * square + (1.0f / 3);
  series = series * square + 1.0f;
  return 2.0f * s * series + (x > 0.0f ? x : Float<W>{});
}

}  // namespace moeserve
