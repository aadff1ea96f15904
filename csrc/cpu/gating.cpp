// One sigmoid per row, and its product with each element.

#include "gating.h"

#include "isa.h"
#include "rows.h"

namespace moeserve {

namespace {

template <int W, bool kIsWhole, typename Element>
MOESERVE_INLINE void scale_part(const Element* row, Float<W> factor, Element* out, int64_t count) {
  const Pair<W> part = load_part<W, kIsWhole>(row, count);
  store_part<W, kIsWhole>(out, round_to<W>(out, Pair<W>{part.first * factor, part.second * factor}), count);
}

template <int W, typename Element>
MOESERVE_INLINE void gate_range(const Gating& gating, int64_t first, int64_t last) {
  const auto* gates = static_cast<const Element*>(gating.gates);
  for (int64_t t = first; t < last; ++t) {
    const Element* row = static_cast<const Element*>(gating.rows) + t * gating.width;
    Element* out = static_cast<Element*>(gating.out) + t * gating.width;
    const Float<W> factor = round_to<W>(gates, sigmoid<W>(broadcast<W>(widen(gates[t]))));
    int64_t d = 0;
    for (; d + 2 * W <= gating.width; d += 2 * W) scale_part<W, true>(row + d, factor, out + d, 2 * W);
    if (d < gating.width) scale_part<W, false>(row + d, factor, out + d, gating.width - d);
  }
}

template <int W>
MOESERVE_INLINE void gate_range(const Gating& gating, int64_t first, int64_t last) {
  if (gating.type == ElementType::kBFloat16) {
    gate_range<W, BFloat16>(gating, first, last);
  } else {
    gate_range<W, float>(gating, first, last);
  }
}

MOESERVE_DEFINE_VARIANTS(gate_range, (const Gating& gating, int64_t first, int64_t last), (gating, first, last))

}  // namespace

void gate_rows(const Gating& gating) {
  const auto run = choose_gate_range(current_isa());
  for_rows(gating.num_rows, 2 * element_bytes(gating.type) * gating.width,
           [&](int64_t first, int64_t last) { run(gating, first, last); });
}

}  // namespace moeserve
