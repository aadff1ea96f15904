// The gated delta rule, token by token. There are few operations for each value of the state, so the state stays in the
// L1 cache for several tokens. Vector lanes are values, so sums over keys have the same order with any vector width.

#include "gated_delta.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "isa.h"
#include "lanes.h"
#include "parallel.h"
#include "rows.h"

namespace moeserve {

namespace {

constexpr int64_t kTokens = 32;  // tokens whose queries and keys are prepared together
constexpr float kL2Epsilon = 1e-6f;

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

// ---- Convolution

template <int W, typename Element>
MOESERVE_INLINE void convolve_lanes(const ShortConvolution& step, int64_t chunk, int64_t first, int64_t count) {
  const int num_before = step.num_taps - 1;
  const ChunkStates& chunks = step.chunks;
  const auto history_at = [&](int64_t row, int tap) {
    return static_cast<Element*>(step.states) + (row * num_before + tap) * step.num_channels + first;
  };
  Float<W> taps[kMaxTaps] = {}, history[kMaxTaps - 1] = {};
  for (int tap = 0; tap < step.num_taps; ++tap) {
    taps[tap] = load_lanes<W>(step.taps + tap * step.num_channels + first, count);
  }
  const int64_t load_row = chunks.load[chunk];
  for (int tap = 0; load_row >= 0 && tap < num_before; ++tap) {
    history[tap] = load_lanes<W>(history_at(load_row, tap), count);
  }
  const auto keep = [&](int64_t row) {
    for (int tap = 0; row >= 0 && tap < num_before; ++tap) {
      store_lanes<W>(history_at(row, tap), history[tap], count);
    }
  };
  const int64_t begin = chunks.row_starts[chunk], end = chunks.row_starts[chunk + 1];
  const int64_t saved = begin + chunks.num_before_save[chunk];
  for (int64_t t = begin; t < end; ++t) {
    const Float<W> x = load_lanes<W>(static_cast<const Element*>(step.input) + t * step.row_stride + first, count);
    Float<W> sum = {};
    for (int tap = 0; tap < num_before; ++tap) sum += history[tap] * taps[tap];
    sum += x * taps[num_before];
    store_lanes<W>(step.out + t * step.num_channels + first, silu<W>(sum), count);
    for (int tap = 0; tap + 1 < num_before; ++tap) history[tap] = history[tap + 1];
    history[num_before - 1] = x;
    if (t + 1 == saved) keep(chunks.save[chunk]);
  }
  keep(chunks.store[chunk]);
}

template <int W, typename Element>
MOESERVE_INLINE void convolve_part(const ShortConvolution& step, int64_t chunk, int64_t first, int64_t last) {
  for (int64_t c = first; c < last; c += W) {
    convolve_lanes<W, Element>(step, chunk, c, std::min<int64_t>(W, last - c));
  }
}

MOESERVE_DEFINE_TYPED_VARIANTS(convolve_part, step.type,
                               (const ShortConvolution& step, int64_t chunk, int64_t first, int64_t last),
                               (step, chunk, first, last))

// ---- Delta rule

// Inputs of some tokens of a chunk that all values of a head share.
struct Prepared {
  alignas(64) float queries[kTokens][kMaxDeltaHead];
  alignas(64) float keys[kTokens][kMaxDeltaHead];
  alignas(64) float outputs[kTokens][kMaxDeltaHead];
  float decays[kTokens];
  float rates[kTokens];
};

// Write a vector of a head, normalised to unit length and multiplied by `scale`. Pad it with zeros to a multiple of 4.
template <int W>
MOESERVE_INLINE void normalize(const float* head, int64_t size, float scale, float* out) {
  Float<W> squares = {};
  for (int64_t i = 0; i < size; i += W) {
    const Float<W> lanes = load_lanes<W>(head + i, std::min<int64_t>(W, size - i));
    squares += lanes * lanes;
  }
  const float factor = scale / std::sqrt(sum_lanes<W>(squares) + kL2Epsilon);
  for (int64_t i = 0; i < (size + 3) / 4 * 4; ++i) out[i] = i < size ? head[i] * factor : 0.0f;
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

template <int W, typename Element>
MOESERVE_INLINE void prepare(const GatedDelta& step, int64_t head, int64_t first, int64_t count, Prepared& prepared) {
  const int64_t key_size = step.num_key_heads * step.key_dim;
  const int64_t width = 2 * key_size + step.num_heads * step.value_dim;
  const int64_t key_head = head / (step.num_heads / step.num_key_heads) * step.key_dim;
  const float scale = 1.0f / std::sqrt(static_cast<float>(step.key_dim));
  for (int64_t i = 0; i < count; ++i) {
    const float* row = step.mixed + (first + i) * width + key_head;
    normalize<W>(row, step.key_dim, scale, prepared.queries[i]);
    normalize<W>(row + key_size, step.key_dim, 1.0f, prepared.keys[i]);
    const Element* rates = static_cast<const Element*>(step.rates) + (first + i) * 2 * step.num_heads;
    prepared.rates[i] = 1.0f / (1.0f + std::exp(-widen(rates[head])));
    const float growth = softplus(widen(rates[step.num_heads + head]) + step.decay_bias[head]);
    prepared.decays[i] = std::exp(-std::exp(step.log_decay[head]) * growth);
  }
}

// Update the states [K, count] of some values by some tokens, and write the tokens' outputs. `values` points to the
// first token; rows of tokens are `width` apart.
template <int W>
MOESERVE_INLINE void update(float* states, int64_t state_stride, int64_t key_dim, const float* values, int64_t width,
                            int64_t num_tokens, int64_t first_value, int64_t count, Prepared& prepared) {
  alignas(64) float local[kMaxDeltaHead][2 * W];
  const int64_t num_keys = (key_dim + 3) / 4 * 4;
  for (int64_t k = 0; k < num_keys; ++k) {
    if (k >= key_dim || count < 2 * W) std::memset(local[k], 0, sizeof(local[k]));
    if (k < key_dim) std::memcpy(local[k], states + k * state_stride, count * sizeof(float));
  }
  const int64_t low = std::min<int64_t>(W, count), high = count - low;
  for (int64_t t = 0; t < num_tokens; ++t) {
    const float* key = prepared.keys[t];
    const float* query = prepared.queries[t];
    Float<W> sums[4][2] = {};
    for (int64_t k = 0; k < num_keys; k += 4) {
      MOESERVE_UNROLL
      for (int j = 0; j < 4; ++j) {
        sums[j][0] += load<W>(local[k + j]) * key[k + j];
        sums[j][1] += load<W>(local[k + j] + W) * key[k + j];
      }
    }
    const float decay = prepared.decays[t], rate = prepared.rates[t];
    Float<W> changes[2];
    for (int half = 0; half < 2; ++half) {
      const Float<W> known = ((sums[0][half] + sums[1][half]) + (sums[2][half] + sums[3][half])) * decay;
      const int64_t lanes = half == 0 ? low : high;
      changes[half] = (load_lanes<W>(values + t * width + half * W, lanes) - known) * rate;
    }
    Float<W> outputs[4][2] = {};
    for (int64_t k = 0; k < num_keys; k += 4) {
      MOESERVE_UNROLL
      for (int j = 0; j < 4; ++j) {
        for (int half = 0; half < 2; ++half) {
          const Float<W> state = load<W>(local[k + j] + half * W) * decay + changes[half] * key[k + j];
          store<W>(local[k + j] + half * W, state);
          outputs[j][half] += state * query[k + j];
        }
      }
    }
    for (int half = 0; half < 2; ++half) {
      const Float<W> output = (outputs[0][half] + outputs[1][half]) + (outputs[2][half] + outputs[3][half]);
      store_lanes<W>(prepared.outputs[t] + first_value + half * W, output, half == 0 ? low : high);
    }
  }
  for (int64_t k = 0; k < key_dim; ++k) std::memcpy(states + k * state_stride, local[k], count * sizeof(float));
}

// Normalise the outputs of some tokens and multiply them by the SiLU of their gates.
template <int W, typename Element>
MOESERVE_INLINE void gate(const GatedDelta& step, int64_t head, int64_t first, int64_t count,
                          const Prepared& prepared) {
  const int64_t size = step.value_dim;
  for (int64_t t = 0; t < count; ++t) {
    const float* output = prepared.outputs[t];
    Float<W> squares = {};
    for (int64_t i = 0; i < size; i += W) {
      const Float<W> lanes = load_lanes<W>(output + i, std::min<int64_t>(W, size - i));
      squares += lanes * lanes;
    }
    const float mean = sum_lanes<W>(squares) / static_cast<float>(size);
    const float factor = 1.0f / std::sqrt(mean + step.norm_epsilon);
    const Element* gates = static_cast<const Element*>(step.gates) + (first + t) * step.gate_stride + head * size;
    Element* out = static_cast<Element*>(step.out) + (first + t) * step.num_heads * size + head * size;
    for (int64_t i = 0; i < size; i += W) {
      const int64_t lanes = std::min<int64_t>(W, size - i);
      const Float<W> normed = load_lanes<W>(output + i, lanes) * factor * load_lanes<W>(step.norm + i, lanes);
      store_lanes<W>(out + i, normed * silu<W>(load_lanes<W>(gates + i, lanes)), lanes);
    }
  }
}

template <int W, typename Element>
MOESERVE_INLINE void run_head(const GatedDelta& step, int64_t chunk, int64_t head) {
  static thread_local Prepared prepared;
  static thread_local float scratch[kMaxDeltaHead * kMaxDeltaHead];  // the state of a chunk that stores none
  const ChunkStates& chunks = step.chunks;
  const int64_t state_size = step.key_dim * step.value_dim;
  const auto state_at = [&](int64_t row) { return step.states + (row * step.num_heads + head) * state_size; };
  const int64_t load_row = chunks.load[chunk], store_row = chunks.store[chunk];
  float* state = store_row >= 0 ? state_at(store_row) : scratch;
  if (load_row < 0) {
    std::memset(state, 0, state_size * sizeof(float));
  } else if (load_row != store_row) {
    std::memcpy(state, state_at(load_row), state_size * sizeof(float));
  }
  const int64_t begin = chunks.row_starts[chunk], end = chunks.row_starts[chunk + 1];
  const int64_t saved = chunks.save[chunk] >= 0 ? begin + chunks.num_before_save[chunk] : -1;
  const int64_t width = 2 * step.num_key_heads * step.key_dim + step.num_heads * step.value_dim;
  const float* values = step.mixed + 2 * step.num_key_heads * step.key_dim + head * step.value_dim;
  for (int64_t first = begin; first < end;) {
    int64_t last = std::min(end, first + kTokens);
    if (first < saved) last = std::min(last, saved);
    prepare<W, Element>(step, head, first, last - first, prepared);
    for (int64_t v = 0; v < step.value_dim; v += 2 * W) {
      update<W>(state + v, step.value_dim, step.key_dim, values + first * width + v, width, last - first, v,
                std::min<int64_t>(2 * W, step.value_dim - v), prepared);
    }
    gate<W, Element>(step, head, first, last - first, prepared);
    if (last == saved) std::memcpy(state_at(chunks.save[chunk]), state, state_size * sizeof(float));
    first = last;
  }
}

MOESERVE_DEFINE_TYPED_VARIANTS(run_head, step.type, (const GatedDelta& step, int64_t chunk, int64_t head),
                               (step, chunk, head))

}  // namespace

void convolve(const ShortConvolution& convolution) {
  constexpr int64_t kPart = 512;  // channels that a thread computes at a time
  const auto run = choose_convolve_part_of_type(current_isa());
  const int64_t num_parts = (convolution.num_channels + kPart - 1) / kPart;
  parallel_for(convolution.chunks.num_chunks * num_parts, [&](int64_t item) {
    const int64_t first = item % num_parts * kPart;
    run(convolution, item / num_parts, first, std::min(first + kPart, convolution.num_channels));
  });
}

void gated_delta(const GatedDelta& delta) {
  const auto run = choose_run_head_of_type(current_isa());
  parallel_for(delta.chunks.num_chunks * delta.num_heads,
               [&](int64_t item) { run(delta, item / delta.num_heads, item % delta.num_heads); });
}

}  // namespace moeserve
