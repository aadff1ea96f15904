// One sigmoid for each row, and a product for each of its elements.

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

#if defined(MOESERVE_X86)
MOESERVE_TARGET_AVX512 void gate_range_avx512(const Gating& gating, int64_t first, int64_t last) {
  gate_range<16>(gating, first, last);
}
MOESERVE_TARGET_AVX2 void gate_range_avx2(const Gating& gating, int64_t first, int64_t last) {
  gate_range<8>(gating, first, last);
}
#endif
void gate_range_baseline(const Gating& gating, int64_t first, int64_t last) { gate_range<4>(gating, first, last); }

using GateRange = void (*)(const Gating&, int64_t first, int64_t last);

GateRange choose_gate_range([[maybe_unused]] Isa isa) {
#if defined(MOESERVE_X86)
  return choose_version<GateRange>(isa, gate_range_baseline, gate_range_avx2, gate_range_avx512);
#else
  return gate_range_baseline;
#endif
}

}  // namespace

void gate_rows(const Gating& gating) {
  const GateRange run = choose_gate_range(current_isa());
  for_rows(gating.num_rows, 2 * element_bytes(gating.type) * gating.width,
           [&](int64_t first, int64_t last) { run(gating, first, last); });
}

}  // namespace moeserve
