// Addition, divided among threads by ranges of elements, and gating, divided by rows.

#include "elementwise.h"

#include <algorithm>

#include "isa.h"
#include "partial_lanes.h"
#include "rows.h"

namespace moeserve {

namespace {

constexpr int64_t kPart = 4096;  // elements of a range

template <int W, bool kIsWhole, typename Element>
MOESERVE_INLINE void add_part(const Element* a, const Element* b, const float* factor, Element* out, int64_t count) {
  const Pair<W> first = load_part<W, kIsWhole>(a, count), second = load_part<W, kIsWhole>(b, count);
  Pair<W> sum{first.first + second.first, first.second + second.second};
  sum = round_to<W>(out, sum);
  if (factor != nullptr) sum = round_to<W>(out, Pair<W>{sum.first * *factor, sum.second * *factor});
  store_part<W, kIsWhole>(out, sum, count);
}

template <int W, typename Element>
MOESERVE_INLINE void add_range(const Addition& addition, int64_t first, int64_t last) {
  const auto* a = static_cast<const Element*>(addition.a);
  const auto* b = static_cast<const Element*>(addition.b);
  auto* out = static_cast<Element*>(addition.out);
  int64_t i = first;
  for (; i + 2 * W <= last; i += 2 * W) add_part<W, true>(a + i, b + i, addition.factor, out + i, 2 * W);
  if (i < last) add_part<W, false>(a + i, b + i, addition.factor, out + i, last - i);
}

MOESERVE_DEFINE_TYPED_VARIANTS(add_range, addition.type, (const Addition& addition, int64_t first, int64_t last),
                               (addition, first, last))

template <int W, bool kIsWhole, typename Element>
MOESERVE_INLINE void scale_part(const Element* row, Float<W> factor, Element* out, int64_t count) {
  const Pair<W> part = load_part<W, kIsWhole>(row, count);
  store_part<W, kIsWhole>(out, round_to<W>(out, Pair<W>{part.first * factor, part.second * factor}), count);
}

template <int W>
MOESERVE_INLINE Float<W> factor_of(Float<W> gate, bool is_softplus) {
  return is_softplus ? softplus<W>(gate) : sigmoid<W>(gate);
}

template <int W, bool kIsWhole, typename Element>
MOESERVE_INLINE void gate_part(const Element* gates, const Element* row, Element* out, int64_t count,
                               bool is_softplus) {
  const Pair<W> gate = load_part<W, kIsWhole>(gates, count), part = load_part<W, kIsWhole>(row, count);
  const Pair<W> factors =
      round_to<W>(gates, Pair<W>{factor_of<W>(gate.first, is_softplus), factor_of<W>(gate.second, is_softplus)});
  const Pair<W> gated{part.first * factors.first, part.second * factors.second};
  store_part<W, kIsWhole>(out, round_to<W>(out, gated), count);
}

template <int W, typename Element>
MOESERVE_INLINE void gate_range(const Gating& gating, int64_t first, int64_t last) {
  for (int64_t t = first; t < last; ++t) {
    const Element* gates = static_cast<const Element*>(gating.gates) + t * gating.gate_stride;
    const Element* row = static_cast<const Element*>(gating.rows) + t * gating.width;
    Element* out = static_cast<Element*>(gating.out) + t * gating.width;
    int64_t d = 0;
    if (gating.has_gate_for_each) {
      for (; d + 2 * W <= gating.width; d += 2 * W)
        gate_part<W, true>(gates + d, row + d, out + d, 2 * W, gating.is_softplus);
      if (d < gating.width) gate_part<W, false>(gates + d, row + d, out + d, gating.width - d, gating.is_softplus);
      continue;
    }
    const Float<W> factor = round_to<W>(gates, factor_of<W>(broadcast<W>(widen(gates[0])), gating.is_softplus));
    for (; d + 2 * W <= gating.width; d += 2 * W) scale_part<W, true>(row + d, factor, out + d, 2 * W);
    if (d < gating.width) scale_part<W, false>(row + d, factor, out + d, gating.width - d);
  }
}

MOESERVE_DEFINE_TYPED_VARIANTS(gate_range, gating.type, (const Gating& gating, int64_t first, int64_t last),
                               (gating, first, last))

}  // namespace

void add_elements(const Addition& addition) {
  const auto run = choose_add_range_of_type(current_isa());
  const int64_t num_parts = (addition.num_elements + kPart - 1) / kPart;
  for_rows(num_parts, 3 * element_bytes(addition.type) * kPart, [&](int64_t first, int64_t last) {
    run(addition, first * kPart, std::min(last * kPart, addition.num_elements));
  });
}

void gate_rows(const Gating& gating) {
  const auto run = choose_gate_range_of_type(current_isa());
  for_rows(gating.num_rows, 2 * element_bytes(gating.type) * gating.width,
           [&](int64_t first, int64_t last) { run(gating, first, last); });
}

}  // namespace moeserve
