// The selective scan, token by token. Vector lanes are the values of a channel's state. The states of some channels
// stay in the L1 cache for a whole chunk.

#include "selective_scan.h"

#include <algorithm>
#include <cstring>

#include "isa.h"
#include "parallel.h"
#include "partial_lanes.h"

namespace moeserve {

namespace {

constexpr int64_t kChannels = 64;  // of an item, a multiple of every W

// The channels of an item. Rows of states are padded with zeros to `width` values.
struct Channels {
  alignas(64) float decay_rates[kChannels * kMaxSelectiveState];  // negative
  alignas(64) float states[kChannels * kMaxSelectiveState];
  alignas(64) float inputs[kMaxSelectiveState];
  alignas(64) float outputs[kMaxSelectiveState];
  alignas(64) float steps[kChannels];
  alignas(64) float changes[kChannels];
};

template <int W>
MOESERVE_INLINE void pad_row(const float* row, int64_t size, int64_t width, float* padded) {
  for (int64_t n = 0; n < width; n += W) {
    store<W>(padded + n, load_lanes<W>(row + n, std::clamp<int64_t>(size - n, 0, W)));
  }
}

// Update the states of W channels by a token, and return its sums over them.
template <int W>
MOESERVE_INLINE Float<W> update(Channels& local, int64_t first, int64_t width) {
  Float<W> sums[W];
  for (int i = 0; i < W; ++i) {
    const float step = local.steps[first + i], change = local.changes[first + i];
    const float* decay_rates = local.decay_rates + (first + i) * width;
    float* states = local.states + (first + i) * width;
    Float<W> sum = {};
    for (int64_t n = 0; n < width; n += W) {
      const Float<W> decay = exp_of_nonpositive<W>(step * load<W>(decay_rates + n));
      const Float<W> state = load<W>(states + n) * decay + change * load<W>(local.inputs + n);
      store<W>(states + n, state);
      sum += state * load<W>(local.outputs + n);
    }
    sums[i] = sum;
  }
  return sum_each<W>(sums);
}

// Run a token through `count` channels from `first` on.
template <int W, typename Element>
MOESERVE_INLINE void run_token(const SelectiveScan& scan, int64_t token, int64_t first, int64_t count, int64_t width,
                               Channels& local) {
  pad_row<W>(scan.inputs + token * scan.input_stride, scan.state_size, width, local.inputs);
  pad_row<W>(scan.outputs + token * scan.output_stride, scan.state_size, width, local.outputs);
  const float* values = scan.values + token * scan.num_channels + first;
  const float* steps = scan.steps + token * scan.num_channels + first;
  const Element* gates = static_cast<const Element*>(scan.gates) + token * scan.gate_stride + first;
  Element* out = static_cast<Element*>(scan.out) + token * scan.num_channels + first;
  for (int64_t c = 0; c < count; c += W) {
    const int64_t lanes = std::min<int64_t>(W, count - c);
    const Float<W> value = load_lanes<W>(values + c, lanes), step = softplus<W>(load_lanes<W>(steps + c, lanes));
    store<W>(local.steps + c, step);
    store<W>(local.changes + c, step * value);
    const Float<W> output = update<W>(local, c, width) + value * load_lanes<W>(scan.skip + first + c, lanes);
    store_lanes<W>(out + c, output * silu<W>(load_lanes<W>(gates + c, lanes)), lanes);
  }
}

template <int W, typename Element>
MOESERVE_INLINE void run_channels(const SelectiveScan& scan, int64_t first, int64_t count) {
  static thread_local Channels local;
  const ChunkStates& chunks = scan.chunks;
  const int64_t size = scan.state_size, width = (size + W - 1) / W * W;
  std::memset(local.decay_rates, 0, kChannels * width * sizeof(float));
  for (int64_t c = 0; c < count; ++c) {
    const float* logarithms = scan.log_decay + (first + c) * size;
    for (int64_t n = 0; n < size; n += W) {
      const int64_t lanes = std::min<int64_t>(W, size - n);
      const Float<W> x = load_lanes<W>(logarithms + n, lanes);
      const Float<W> power = exp_of_nonpositive<W>(x > 0.0f ? -x : x);
      store_lanes<W>(local.decay_rates + c * width + n, x > 0.0f ? -1.0f / power : -power, lanes);
    }
  }
  const auto states_at = [&](int64_t row) { return scan.states + (row * scan.num_channels + first) * size; };
  const auto keep = [&](int64_t row) {
    for (int64_t c = 0; row >= 0 && c < count; ++c) {
      std::memcpy(states_at(row) + c * size, local.states + c * width, size * sizeof(float));
    }
  };
  for (int64_t chunk = 0; chunk < chunks.num_chunks; ++chunk) {
    std::memset(local.states, 0, kChannels * width * sizeof(float));
    const int64_t load_row = chunks.load[chunk];
    for (int64_t c = 0; load_row >= 0 && c < count; ++c) {
      std::memcpy(local.states + c * width, states_at(load_row) + c * size, size * sizeof(float));
    }
    const int64_t begin = chunks.row_starts[chunk], saved = begin + chunks.num_before_save[chunk];
    for (int64_t token = begin; token < chunks.row_starts[chunk + 1]; ++token) {
      run_token<W, Element>(scan, token, first, count, width, local);
      if (token + 1 == saved) keep(chunks.save[chunk]);
    }
    keep(chunks.store[chunk]);
  }
}

MOESERVE_DEFINE_TYPED_VARIANTS(run_channels, scan.type, (const SelectiveScan& scan, int64_t first, int64_t count),
                               (scan, first, count))

}  // namespace

void selective_scan(const SelectiveScan& scan) {
  const auto run = choose_run_channels_of_type(current_isa());
  parallel_for((scan.num_channels + kChannels - 1) / kChannels, [&](int64_t item) {
    run(scan, item * kChannels, std::min(kChannels, scan.num_channels - item * kChannels));
  });
}

}  // namespace moeserve
