// Rotary position embedding: W pairs at a time, and the last pairs of a head one by one.

#include "rotary.h"

#include "isa.h"
#include "lanes.h"
#include "rows.h"

namespace moeserve {

namespace {

// Conversion between 2 * W consecutive elements and two vectors of the even and the odd elements.
template <int W, int... kLane>
MOESERVE_INLINE Pair<W> divide(const Pair<W>& both, std::integer_sequence<int, kLane...>) {
  return {pick<W, 2 * kLane...>(both.first, both.second), pick<W, (2 * kLane + 1)...>(both.first, both.second)};
}
template <int W, int... kLane>
MOESERVE_INLINE Pair<W> join(const Pair<W>& both, std::integer_sequence<int, kLane...>) {
  return {pick<W, (kLane / 2 + kLane % 2 * W)...>(both.first, both.second),
          pick<W, (kLane / 2 + kLane % 2 * W + W / 2)...>(both.first, both.second)};
}
template <int W>
MOESERVE_INLINE Pair<W> load_even_and_odd(const float* source) {
  return divide<W>(load_pair<W>(source), std::make_integer_sequence<int, W>{});
}
template <int W>
MOESERVE_INLINE Pair<W> load_even_and_odd(const BFloat16* source) {
  return load_pair<W>(source);
}
template <int W>
MOESERVE_INLINE void store_even_and_odd(float* target, const Pair<W>& pair) {
  store_pair<W>(target, join<W>(pair, std::make_integer_sequence<int, W>{}));
}
template <int W>
MOESERVE_INLINE void store_even_and_odd(BFloat16* target, const Pair<W>& pair) {
  store_pair<W>(target, round_to<W>(target, pair));
}

template <int W, typename Element>
MOESERVE_INLINE void rotate_head(const Element* head, Element* target, const float* cosines, const float* sines,
                                 int64_t num_pairs, bool is_interleaved) {
  int64_t f = 0;
  for (; f + W <= num_pairs; f += W) {
    const Float<W> cosine = load<W>(cosines + f), sine = load<W>(sines + f);
    Pair<W> pair;
    if (is_interleaved) {
      pair = load_even_and_odd<W>(head + 2 * f);
    } else {
      pair = {load_in_order<W>(head + f), load_in_order<W>(head + num_pairs + f)};
    }
    const Pair<W> rotated{pair.first * cosine - pair.second * sine, pair.second * cosine + pair.first * sine};
    if (is_interleaved) {
      store_even_and_odd<W>(target + 2 * f, rotated);
    } else {
      store_in_order<W>(target + f, rotated.first);
      store_in_order<W>(target + num_pairs + f, rotated.second);
    }
  }
  for (; f < num_pairs; ++f) {
    const int64_t first = is_interleaved ? 2 * f : f;
    const int64_t second = is_interleaved ? 2 * f + 1 : num_pairs + f;
    const float a = widen(head[first]), b = widen(head[second]);
    assign(target + first, a * cosines[f] - b * sines[f]);
    assign(target + second, b * cosines[f] + a * sines[f]);
  }
}

template <int W, typename Element>
MOESERVE_INLINE void rotate_tokens(const RotaryEmbedding& rotary, int64_t first, int64_t last) {
  const int64_t num_unrotated = rotary.head_size - 2 * rotary.num_pairs;
  for (int64_t t = first; t < last; ++t) {
    const Element* head = static_cast<const Element*>(rotary.source.data) + t * rotary.source.token_stride;
    Element* target = static_cast<Element*>(rotary.target.data) + t * rotary.target.token_stride;
    const float* cosines = rotary.cosines + t * rotary.num_pairs;
    const float* sines = rotary.sines + t * rotary.num_pairs;
    for (int64_t n = 0; n < rotary.num_heads; ++n) {
      rotate_head<W>(head, target, cosines, sines, rotary.num_pairs, rotary.is_interleaved);
      const int64_t num_rotated = 2 * rotary.num_pairs;
      if (target != head) std::memcpy(target + num_rotated, head + num_rotated, num_unrotated * sizeof(Element));
      head += rotary.source.head_stride;
      target += rotary.target.head_stride;
    }
  }
}

MOESERVE_DEFINE_TYPED_VARIANTS(rotate_tokens, rotary.type, (const RotaryEmbedding& rotary, int64_t first, int64_t last),
                               (rotary, first, last))

}  // namespace

void apply_rope(const RotaryEmbedding& rotary) {
  const auto run = choose_rotate_tokens_of_type(current_isa());
  const int64_t bytes_per_token = rotary.num_pairs * (4 * rotary.num_heads * element_bytes(rotary.type) + 8);
  for_rows(rotary.num_tokens, bytes_per_token, [&](int64_t first, int64_t last) { run(rotary, first, last); });
}

}  // namespace moeserve
