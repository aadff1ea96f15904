// Rotary position embedding: W pairs at a time, and a row's last ones one by one.

#include "rotary.h"

#include "isa.h"
#include "lanes.h"
#include "rows.h"

namespace moeserve {

namespace {

// 2 * W consecutive elements: those with an even index, and those with an odd one.
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
MOESERVE_INLINE void turn_head(const Element* head, Element* target, const float* cosines, const float* sines,
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
    const Pair<W> turned{pair.first * cosine - pair.second * sine, pair.second * cosine + pair.first * sine};
    if (is_interleaved) {
      store_even_and_odd<W>(target + 2 * f, turned);
    } else {
      store_in_order<W>(target + f, turned.first);
      store_in_order<W>(target + num_pairs + f, turned.second);
    }
  }
  for (; f < num_pairs; ++f) {
    const int64_t first = is_interleaved ? 2 * f : f;
    const int64_t second = is_interleaved ? 2 * f + 1 : num_pairs + f;
    const float a = widen(head + first), b = widen(head + second);
    assign(target + first, a * cosines[f] - b * sines[f]);
    assign(target + second, b * cosines[f] + a * sines[f]);
  }
}

template <int W, typename Element>
MOESERVE_INLINE void turn_tokens(const RotaryTurn& turn, int64_t first, int64_t last) {
  const int64_t num_left = turn.head_size - 2 * turn.num_pairs;
  for (int64_t t = first; t < last; ++t) {
    const Element* head = static_cast<const Element*>(turn.source.data) + t * turn.source.token_stride;
    Element* target = static_cast<Element*>(turn.target.data) + t * turn.target.token_stride;
    const float* cosines = turn.cosines + t * turn.num_pairs;
    const float* sines = turn.sines + t * turn.num_pairs;
    for (int64_t n = 0; n < turn.num_heads; ++n) {
      turn_head<W>(head, target, cosines, sines, turn.num_pairs, turn.is_interleaved);
      const int64_t num_turned = 2 * turn.num_pairs;
      if (target != head) std::memcpy(target + num_turned, head + num_turned, num_left * sizeof(Element));
      head += turn.source.head_stride;
      target += turn.target.head_stride;
    }
  }
}

template <int W>
MOESERVE_INLINE void turn_tokens(const RotaryTurn& turn, int64_t first, int64_t last) {
  if (turn.type == ElementType::kBFloat16) {
    turn_tokens<W, BFloat16>(turn, first, last);
  } else {
    turn_tokens<W, float>(turn, first, last);
  }
}

#if defined(MOESERVE_X86)
MOESERVE_TARGET_AVX512 void turn_tokens_avx512(const RotaryTurn& turn, int64_t first, int64_t last) {
  turn_tokens<16>(turn, first, last);
}
MOESERVE_TARGET_AVX2 void turn_tokens_avx2(const RotaryTurn& turn, int64_t first, int64_t last) {
  turn_tokens<8>(turn, first, last);
}
#endif
void turn_tokens_baseline(const RotaryTurn& turn, int64_t first, int64_t last) { turn_tokens<4>(turn, first, last); }

using TurnTokens = void (*)(const RotaryTurn&, int64_t first, int64_t last);

TurnTokens choose_turn_tokens([[maybe_unused]] Isa isa) {
#if defined(MOESERVE_X86)
  return choose_version<TurnTokens>(isa, turn_tokens_baseline, turn_tokens_avx2, turn_tokens_avx512);
#else
  return turn_tokens_baseline;
#endif
}

}  // namespace

void turn_heads(const RotaryTurn& turn) {
  const TurnTokens run = choose_turn_tokens(current_isa());
  const int64_t bytes_per_token = turn.num_pairs * (4 * turn.num_heads * element_bytes(turn.type) + 8);
  for_rows(turn.num_tokens, bytes_per_token, [&](int64_t first, int64_t last) { run(turn, first, last); });
}

}  // namespace moeserve
