// Addition, divided among threads in parts of some thousand elements.

#include "addition.h"

#include <algorithm>

#include "isa.h"
#include "rows.h"

namespace moeserve {

namespace {

constexpr int64_t kPart = 4096;  // elements that one thread adds at a time

template <int W, bool kIsWhole, typename Element>
MOESERVE_INLINE void add_part(const Element* a, const Element* b, Element* out, int64_t count) {
  const Pair<W> first = load_part<W, kIsWhole>(a, count), second = load_part<W, kIsWhole>(b, count);
  const Pair<W> sum{first.first + second.first, first.second + second.second};
  store_part<W, kIsWhole>(out, round_to<W>(out, sum), count);
}

template <int W, typename Element>
MOESERVE_INLINE void add_range(const Addition& addition, int64_t first, int64_t last) {
  const auto* a = static_cast<const Element*>(addition.a);
  const auto* b = static_cast<const Element*>(addition.b);
  auto* out = static_cast<Element*>(addition.out);
  int64_t i = first;
  for (; i + 2 * W <= last; i += 2 * W) add_part<W, true>(a + i, b + i, out + i, 2 * W);
  if (i < last) add_part<W, false>(a + i, b + i, out + i, last - i);
}

template <int W>
MOESERVE_INLINE void add_range(const Addition& addition, int64_t first, int64_t last) {
  if (addition.type == ElementType::kBFloat16) {
    add_range<W, BFloat16>(addition, first, last);
  } else {
    add_range<W, float>(addition, first, last);
  }
}

MOESERVE_DEFINE_VARIANTS(add_range, (const Addition& addition, int64_t first, int64_t last), (addition, first, last))

}  // namespace

void add_elements(const Addition& addition) {
  const auto run = choose_add_range(current_isa());
  const int64_t num_parts = (addition.num_elements + kPart - 1) / kPart;
  for_rows(num_parts, 3 * element_bytes(addition.type) * kPart, [&](int64_t first, int64_t last) {
    run(addition, first * kPart, std::min(last * kPart, addition.num_elements));
  });
}

}  // namespace moeserve
