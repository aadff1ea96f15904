// Packing of weights in MXFP4: codes and scales are moved, not changed.

#include <algorithm>
#include <cstring>

#include "parallel.h"
#include "weight_format.h"

namespace moeserve {

namespace {

constexpr int kGroupCodeBytes = kInputGroup / 2;  // bytes per output, as checkpoints store them

// Return the code of input `k` of a group.
uint8_t code_at(const uint8_t* group, int k) { return k % 2 == 0 ? group[k / 2] & 15 : group[k / 2] >> 4; }

// Pack the codes [count, kGroupCodeBytes] of a group of inputs, padded with zeros. `stride` is the distance between
// outputs.
void pack_group(const uint8_t* codes, int64_t stride, int count, uint8_t* target) {
  constexpr uint8_t kZeros[kGroupCodeBytes] = {};
  for (int c = 0; c < kPanel / 2; ++c) {
    const uint8_t* low = c < count ? codes + c * stride : kZeros;
    const uint8_t* high = c + kPanel / 2 < count ? codes + (c + kPanel / 2) * stride : kZeros;
    for (int k = 0; k < kInputGroup; ++k) {
      target[k / 4 * 2 * kPanel + 4 * c + k % 4] = static_cast<uint8_t>(code_at(low, k) | code_at(high, k) << 4);
    }
  }
}

}  // namespace

bool pack_mxfp4(WeightFormat, const StoredRows& rows, const InputChunks& chunks, char* panels) {
  const int64_t num_groups = chunks.num_inputs / kInputGroup;
  parallel_for(count_panels(rows.count), [&](int64_t p) {
    const int64_t first = p * kPanel;
    const int count = static_cast<int>(std::min<int64_t>(kPanel, rows.count - first));
    char* panel = panels + p * num_groups * kMxfp4GroupBytes;
    for (int64_t group = 0; group < num_groups; ++group, panel += kMxfp4GroupBytes) {
      pack_group(rows.blocks + first * rows.stride + group * kGroupCodeBytes, rows.stride, count,
                 reinterpret_cast<uint8_t*>(panel));
      std::memset(panel + kInt4ScalesAt, 0, kPanel);
      for (int n = 0; n < count; ++n) panel[kInt4ScalesAt + n] = rows.scales[(first + n) * num_groups + group];
    }
  });
  return true;
}

}  // namespace moeserve
