// Short convolutions. Vector lanes are channels; the last inputs stay in registers from token to token.

#include "short_convolution.h"

#include <algorithm>

#include "isa.h"
#include "parallel.h"
#include "partial_lanes.h"

namespace moeserve {

namespace {

// With kTaps = 0 the number of taps is `step.num_taps`, and history and taps do not fit in the registers.
template <int W, typename Element, int kTaps>
MOESERVE_INLINE void convolve_lanes(const ShortConvolution& step, int64_t chunk, int64_t first, int64_t count) {
  constexpr int kMost = kTaps > 0 ? kTaps : kMaxTaps;
  const int num_taps = kTaps > 0 ? kTaps : step.num_taps, num_before = num_taps - 1;
  const ChunkStates& chunks = step.chunks;
  const auto history_at = [&](int64_t row, int tap) {
    return static_cast<Element*>(step.states) + (row * num_before + tap) * step.num_channels + first;
  };
  Float<W> taps[kMost], history[kMost] = {};
  for (int tap = 0; tap < num_taps; ++tap) {
    taps[tap] = load_lanes<W>(step.taps + tap * step.num_channels + first, count);
  }
  const Float<W> bias = step.bias == nullptr ? Float<W>{} : load_lanes<W>(step.bias + first, count);
  const Float<W> scale = broadcast<W>(step.scale == nullptr ? 1.0f : *step.scale);
  const int64_t load_row = chunks.load[chunk];
  for (int tap = 0; load_row >= 0 && tap < num_before; ++tap) {
    history[tap] = load_lanes<W>(history_at(load_row, tap), count);
  }
  const auto keep = [&](int64_t row) {
    for (int tap = 0; row >= 0 && tap < num_before; ++tap) {
      store_lanes<W>(history_at(row, tap), history[tap], count);
    }
  };
  // Return the numbers that are added to the taps of token `t` for the token `lag` before it.
  const auto token_taps = [&](int64_t t, int lag) -> Float<W> {
    const int64_t num_groups = step.num_channels / step.group_size;
    const auto* own = static_cast<const Element*>(step.token_taps) + t * num_groups * step.num_taps + lag;
    const int64_t group = first / step.group_size;
    if ((first + count - 1) / step.group_size == group) return broadcast<W>(widen(own[group * step.num_taps]));
    alignas(64) float lanes[W] = {};
    for (int64_t i = 0; i < count; ++i) lanes[i] = widen(own[(first + i) / step.group_size * step.num_taps]);
    return load<W>(lanes);
  };
  const int64_t begin = chunks.row_starts[chunk], end = chunks.row_starts[chunk + 1];
  const int64_t saved = begin + chunks.num_before_save[chunk];
  for (int64_t t = begin; t < end; ++t) {
    const Element* row = static_cast<const Element*>(step.input) + t * step.row_stride + first;
    Float<W> x = load_lanes<W>(row + (step.is_gated ? 2 * step.num_channels : 0), count);
    if (step.is_gated) {
      Element rounded[W];
      store_in_order<W>(rounded, load_lanes<W>(row, count) * x);
      x = load_in_order<W>(rounded);
    }
    Float<W> sum = bias;
    if (step.token_taps == nullptr) {
      for (int tap = 0; tap < num_before; ++tap) sum += history[tap] * taps[tap];
      sum += x * taps[num_before];
    } else {
      for (int tap = 0; tap < num_before; ++tap) {
        sum += history[tap] * (taps[tap] + token_taps(t, num_before - tap));
      }
      sum += x * (taps[num_before] + token_taps(t, 0));
    }
    const int64_t place = t * step.num_channels + first;
    if (step.is_gated) {
      const Float<W> gated = sum * load_lanes<W>(row + step.num_channels, count);
      store_lanes<W>(static_cast<Element*>(step.out) + place, gated, count);
    } else if (step.is_linear) {
      store_lanes<W>(static_cast<Element*>(step.out) + place, sum * scale, count);
    } else {
      store_lanes<W>(static_cast<float*>(step.out) + place, silu<W>(sum), count);
    }
    for (int tap = 0; tap + 1 < num_before; ++tap) history[tap] = history[tap + 1];
    if (num_before > 0) history[num_before - 1] = x;
    if (t + 1 == saved) keep(chunks.save[chunk]);
  }
  keep(chunks.store[chunk]);
}

template <int W, typename Element>
MOESERVE_INLINE void convolve_part(const ShortConvolution& step, int64_t chunk, int64_t first, int64_t last) {
  for (int64_t c = first; c < last; c += W) {
    const int64_t count = std::min<int64_t>(W, last - c);
    step.num_taps == 4 ? convolve_lanes<W, Element, 4>(step, chunk, c, count)
                       : convolve_lanes<W, Element, 0>(step, chunk, c, count);
  }
}

MOESERVE_DEFINE_TYPED_VARIANTS(convolve_part, step.type,
                               (const ShortConvolution& step, int64_t chunk, int64_t first, int64_t last),
                               (step, chunk, first, last))

}  // namespace

void short_convolution(const ShortConvolution& convolution) {
  constexpr int64_t kPart = 512;  // channels per item
  const auto run = choose_convolve_part_of_type(current_isa());
  const int64_t num_parts = (convolution.num_channels + kPart - 1) / kPart;
  parallel_for(convolution.chunks.num_chunks * num_parts, [&](int64_t item) {
    const int64_t first = item % num_parts * kPart;
    run(convolution, item / num_parts, first, std::min(first + kPart, convolution.num_channels));
  });
}

}  // namespace moeserve
