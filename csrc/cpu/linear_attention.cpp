// Linear attention, token by token. There are few operations for each value of the state, so the state stays in the L1
// cache for several tokens. Vector lanes are values, so sums over keys have the same order with any vector width.

#include "linear_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "isa.h"
#include "parallel.h"
#include "partial_lanes.h"

namespace moeserve {

namespace {

constexpr int64_t kTokens = 32;        // tokens whose queries and keys are prepared together
constexpr int64_t kItemValues = 4096;  // that a thread normalises at a time
constexpr float kL2Epsilon = 1e-6f;

// Inputs of some tokens of a chunk that all values of a head share.
struct Prepared {
  alignas(64) float queries[kTokens][kMaxLinearHead];
  alignas(64) float keys[kTokens][kMaxLinearHead];
  alignas(64) float decays[kTokens][kMaxLinearHead];        // of each channel; otherwise the first one only
  alignas(64) float decayed_keys[kTokens][kMaxLinearHead];  // if channels have decays of their own
  float rates[kTokens];                                     // factors of the changes
};

// Return the decays of inputs to which the bias was added.
template <int W>
MOESERVE_INLINE Float<W> decay_of(const LinearAttention& step, Float<W> x, float growth) {
  if (step.decay_floor < 0.0f) return exp_of_nonpositive<W>(step.decay_floor * sigmoid<W>(growth * x));
  return exp_of_nonpositive<W>(-growth * softplus<W>(x));
}

// Write a vector of a head, padded with zeros to a multiple of 4. With `is_normalized`, it gets unit length. It is
// multiplied by `scale`.
template <int W>
MOESERVE_INLINE void prepare_vector(const float* head, int64_t size, bool is_normalized, float scale, float* out) {
  if (is_normalized) {
    Float<W> squares = {};
    for (int64_t i = 0; i < size; i += W) {
      const Float<W> lanes = load_lanes<W>(head + i, std::min<int64_t>(W, size - i));
      squares += lanes * lanes;
    }
    scale /= std::sqrt(sum_lanes<W>(squares) + kL2Epsilon);
  }
  for (int64_t i = 0; i < (size + 3) / 4 * 4; ++i) out[i] = i < size ? head[i] * scale : 0.0f;
}

template <int W, typename Element>
MOESERVE_INLINE void prepare(const LinearAttention& step, int64_t head, int64_t first, int64_t count,
                             Prepared& prepared) {
  const int64_t size = step.key_dim, key_size = step.num_key_heads * size;
  const int64_t width = 2 * key_size + step.num_heads * step.value_dim;
  const int64_t key_head = head / (step.num_heads / step.num_key_heads) * size;
  const bool is_delta = step.rates != nullptr;
  const float scale = is_delta ? 1.0f / std::sqrt(static_cast<float>(size)) : 1.0f;
  const float growth = std::exp(step.log_decay[head]);
  const float constant = exp_of_nonpositive<W>(broadcast<W>(-growth))[0];
  for (int64_t i = 0; i < count; ++i) {
    const float* row = step.mixed + (first + i) * width + key_head;
    prepare_vector<W>(row, size, is_delta, scale, prepared.queries[i]);
    prepare_vector<W>(row + key_size, size, is_delta, 1.0f, prepared.keys[i]);
    if (step.decays == nullptr) {
      prepared.decays[i][0] = constant;
      prepared.rates[i] = 1.0f;
      continue;
    }
    const Element* decays = static_cast<const Element*>(step.decays) + (first + i) * step.decay_stride;
    if (step.has_channel_decays) {
      for (int64_t k = 0; k < size; k += W) {
        const int64_t lanes = std::min<int64_t>(W, size - k);
        const Float<W> x =
            load_lanes<W>(decays + head * size + k, lanes) + load_lanes<W>(step.decay_bias + head * size + k, lanes);
        const Float<W> decay = decay_of<W>(step, x, growth);
        store_lanes<W>(prepared.decays[i] + k, decay, lanes);
        store_lanes<W>(prepared.decayed_keys[i] + k, decay * load_lanes<W>(prepared.keys[i] + k, lanes), lanes);
      }
      for (int64_t k = size; k < (size + 3) / 4 * 4; ++k) prepared.decays[i][k] = prepared.decayed_keys[i][k] = 0.0f;
    } else {
      const Float<W> x = broadcast<W>(widen(decays[head]) + step.decay_bias[head]);
      prepared.decays[i][0] = decay_of<W>(step, x, growth)[0];
      if (!is_delta) prepared.rates[i] = softplus<W>(x)[0];
    }
    if (is_delta) {
      const Element* rates = static_cast<const Element*>(step.rates) + (first + i) * step.rate_stride;
      prepared.rates[i] = 1.0f / (1.0f + std::exp(-widen(rates[head])));
    }
  }
}

// Update the states [K, count] of some values by some tokens, and write the tokens' outputs. `values` and `outputs`
// point to the first token; their rows are `width` and `output_stride` apart. Meanwhile, prefetch memory from `next`
// on, as much as these states have; null: none.
template <int W, bool kIsDelta, bool kHasChannelDecays>
MOESERVE_INLINE void update(float* states, int64_t state_stride, const char* next, int64_t key_dim, const float* values,
                            int64_t width, float* outputs, int64_t output_stride, int64_t num_tokens, int64_t count,
                            float skip, const Prepared& prepared) {
  alignas(64) float local[kMaxLinearHead][2 * W];
  const int64_t num_keys = (key_dim + 3) / 4 * 4;
  const int64_t low = std::min<int64_t>(W, count), high = count - low;
  for (int64_t k = 0; k < num_keys; ++k) {
    const float* source = states + k * state_stride;
    store<W>(local[k], load_lanes<W>(source, k < key_dim ? low : 0));
    store<W>(local[k] + W, load_lanes<W>(source + W, k < key_dim ? high : 0));
    if (next == nullptr) continue;
    for (int line = 0; line < W / 8; ++line, next += 64) __builtin_prefetch(next, 0, 2);
  }
  for (int64_t t = 0; t < num_tokens; ++t) {
    const float *key = prepared.keys[t], *query = prepared.queries[t], *decays = prepared.decays[t];
    const float decay = decays[0], rate = prepared.rates[t];
    const Float<W> own[2] = {load_lanes<W>(values + t * width, low), load_lanes<W>(values + t * width + W, high)};
    Float<W> changes[2] = {own[0] * rate, own[1] * rate};
    if constexpr (kIsDelta) {
      const float* decayed = kHasChannelDecays ? prepared.decayed_keys[t] : key;
      Float<W> sums[4][2] = {};
      for (int64_t k = 0; k < num_keys; k += 4) {
        MOESERVE_UNROLL
        for (int j = 0; j < 4; ++j) {
          sums[j][0] += load<W>(local[k + j]) * decayed[k + j];
          sums[j][1] += load<W>(local[k + j] + W) * decayed[k + j];
        }
      }
      for (int half = 0; half < 2; ++half) {
        Float<W> known = (sums[0][half] + sums[1][half]) + (sums[2][half] + sums[3][half]);
        if constexpr (!kHasChannelDecays) known *= decay;
        changes[half] = (own[half] - known) * rate;
      }
    }
    Float<W> results[4][2] = {};
    for (int64_t k = 0; k < num_keys; k += 4) {
      MOESERVE_UNROLL
      for (int j = 0; j < 4; ++j) {
        for (int half = 0; half < 2; ++half) {
          const float factor = kHasChannelDecays ? decays[k + j] : decay;
          const Float<W> state = load<W>(local[k + j] + half * W) * factor + changes[half] * key[k + j];
          store<W>(local[k + j] + half * W, state);
          results[j][half] += state * query[k + j];
        }
      }
    }
    for (int half = 0; half < 2; ++half) {
      Float<W> result = (results[0][half] + results[1][half]) + (results[2][half] + results[3][half]);
      if constexpr (!kIsDelta) result += skip * own[half];
      store_lanes<W>(outputs + t * output_stride + half * W, result, half == 0 ? low : high);
    }
  }
  for (int64_t k = 0; k < key_dim; ++k) {
    store_lanes<W>(states + k * state_stride, load<W>(local[k]), low);
    store_lanes<W>(states + k * state_stride + W, load<W>(local[k] + W), high);
  }
}

template <int W, typename Element>
MOESERVE_INLINE void run_head(const LinearAttention& step, int64_t chunk, int64_t head) {
  static thread_local Prepared prepared;
  static thread_local float scratch[kMaxLinearHead * kMaxLinearHead];  // the state of a chunk that stores none
  const ChunkStates& chunks = step.chunks;
  const int64_t size = step.value_dim, state_size = step.key_dim * size;
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
  const int64_t key_size = step.num_key_heads * step.key_dim, output_stride = step.num_heads * size;
  const int64_t width = 2 * key_size + output_stride;
  const float skip = step.skip == nullptr ? 0.0f : step.skip[head];
  // The state of the next item. The strips of a state are too far apart for the processor to prefetch them.
  const int64_t next_chunk = chunk + (head + 1) / step.num_heads, next_head = (head + 1) % step.num_heads;
  const char* next = nullptr;
  if (next_chunk < chunks.num_chunks && chunks.load[next_chunk] >= 0) {
    next = reinterpret_cast<const char*>(step.states +
                                         (chunks.load[next_chunk] * step.num_heads + next_head) * state_size);
  }
  for (int64_t first = begin; first < end;) {
    int64_t last = std::min(end, first + kTokens);
    if (first < saved) last = std::min(last, saved);
    prepare<W, Element>(step, head, first, last - first, prepared);
    for (int64_t v = 0; v < size; v += 2 * W) {
      const float* values = step.mixed + first * width + 2 * key_size + head * size + v;
      float* outputs = step.outputs + first * output_stride + head * size + v;
      const int64_t num_tokens = last - first, count = std::min<int64_t>(2 * W, size - v);
      if (step.rates == nullptr) {
        update<W, false, false>(state + v, size, next, step.key_dim, values, width, outputs, output_stride, num_tokens,
                                count, skip, prepared);
      } else if (step.has_channel_decays) {
        update<W, true, true>(state + v, size, next, step.key_dim, values, width, outputs, output_stride, num_tokens,
                              count, skip, prepared);
      } else {
        update<W, true, false>(state + v, size, next, step.key_dim, values, width, outputs, output_stride, num_tokens,
                               count, skip, prepared);
      }
      if (next != nullptr) next += step.key_dim * count * sizeof(float);
    }
    next = nullptr;
    if (last == saved) std::memcpy(state_at(chunks.save[chunk]), state, state_size * sizeof(float));
    first = last;
  }
}

MOESERVE_DEFINE_TYPED_VARIANTS(run_head, step.type, (const LinearAttention& step, int64_t chunk, int64_t head),
                               (step, chunk, head))

// Normalise a token's outputs of some heads, and multiply them by their gates, before the norm or after it. Without
// gates, only round them.
template <int W, typename Element>
MOESERVE_INLINE void gate(const LinearAttention& step, int64_t token, int64_t first_head) {
  const int64_t first = first_head * step.value_dim, size = step.norm_heads * step.value_dim;
  const int64_t row_size = step.num_heads * step.value_dim;
  float* outputs = step.outputs + token * row_size + first;
  Element* out = static_cast<Element*>(step.out) + token * row_size + first;
  if (step.gates == nullptr) {
    for (int64_t i = 0; i < size; i += W) {
      const int64_t lanes = std::min<int64_t>(W, size - i);
      store_lanes<W>(out + i, load_lanes<W>(outputs + i, lanes), lanes);
    }
    return;
  }
  const Element* gates = static_cast<const Element*>(step.gates) + token * step.gate_stride + first;
  const float* norm = step.norm + (step.has_norm_of_each ? first : 0);
  const auto gate_at = [&](int64_t i, int64_t lanes) {
    const Float<W> x = load_lanes<W>(gates + i, lanes);
    return step.gates_with_sigmoid ? sigmoid<W>(x) : silu<W>(x);
  };
  Float<W> squares = {};
  for (int64_t i = 0; i < size; i += W) {
    const int64_t lanes = std::min<int64_t>(W, size - i);
    Float<W> output = load_lanes<W>(outputs + i, lanes);
    if (step.gates_before_norm) {
      output *= gate_at(i, lanes);
      store_lanes<W>(outputs + i, output, lanes);
    }
    squares += output * output;
  }
  const float mean = sum_lanes<W>(squares) / static_cast<float>(size);
  const float factor = 1.0f / std::sqrt(mean + step.norm_epsilon);
  for (int64_t i = 0; i < size; i += W) {
    const int64_t lanes = std::min<int64_t>(W, size - i);
    Float<W> normed = load_lanes<W>(outputs + i, lanes) * factor * load_lanes<W>(norm + i, lanes);
    if (!step.gates_before_norm) normed *= gate_at(i, lanes);
    store_lanes<W>(out + i, normed, lanes);
  }
}

MOESERVE_DEFINE_TYPED_VARIANTS(gate, step.type, (const LinearAttention& step, int64_t token, int64_t first_head),
                               (step, token, first_head))

}  // namespace

void linear_attention(const LinearAttention& step) {
  const Isa isa = current_isa();
  const auto run = choose_run_head_of_type(isa);
  parallel_for(step.chunks.num_chunks * step.num_heads,
               [&](int64_t item) { run(step, item / step.num_heads, item % step.num_heads); });
  const auto finish = choose_gate_of_type(isa);
  const int64_t num_tokens = step.chunks.row_starts[step.chunks.num_chunks];
  const int64_t num_groups = step.num_heads / step.norm_heads, num_norms = num_tokens * num_groups;
  const int64_t per_item = std::max<int64_t>(1, kItemValues / (step.norm_heads * step.value_dim));
  parallel_for((num_norms + per_item - 1) / per_item, [&](int64_t item) {
    for (int64_t i = item * per_item; i < std::min(num_norms, (item + 1) * per_item); ++i) {
      finish(step, i / num_groups, i % num_groups * step.norm_heads);
    }
  });
}

}  // namespace moeserve
