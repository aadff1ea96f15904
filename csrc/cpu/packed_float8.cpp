// Packing of weights in FP8: codes and scales are moved, not changed.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "float8_panels.h"
#include "parallel.h"
#include "weight_format.h"

namespace moeserve {

namespace {

// The scales for which no number in bfloat16 is subnormal or infinite.
constexpr float kLeastScale = 7.888609052e-31f;   // 2^-100
constexpr float kLargestScale = 1.267650600e30f;  // 2^100

// Return true if one of four codes is below 8, which has zero and the subnormal numbers, without its sign.
bool has_small(uint32_t codes) { return (((codes & 0x7F7F7F7Fu) + 0x78787878u) & 0x80808080u) != 0x80808080u; }

bool has_nan(uint32_t codes) { return (((codes & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u) != 0; }

// Pack a unit of `count` outputs, padded with zeros. Return false if a scale or a code is not finite.
bool pack_unit(const uint8_t* codes, int64_t stride, const char* scales, int64_t scale_stride, int count,
               int64_t num_inputs, char* target) {
  float all[kPanel];
  for (int n = 0; n < kPanel; ++n) {
    std::memcpy(&all[n], scales + std::min(n, count - 1) * scale_stride, sizeof(float));
  }
  bool is_finite = std::all_of(all, all + kPanel, [](float scale) { return std::isfinite(scale); });
  uint32_t fours_with_small = 0;
  for (int64_t k = 0; k < num_inputs; k += 4) {
    for (int n = 0; n < kPanel; ++n) {
      uint32_t four = 0;
      if (n < count) std::memcpy(&four, codes + n * stride + k, sizeof(four));
      if (has_small(four)) fours_with_small |= 1u << (k / 4);
      is_finite &= !has_nan(four);
      const uint16_t pairs[2] = {static_cast<uint16_t>(four), static_cast<uint16_t>(four >> 16)};
      char* place = target + kFloat8CodesAt + k * kPanel + n / 4 * 16 + n % 4 * 2;
      std::memcpy(place, &pairs[0], sizeof(pairs[0]));
      std::memcpy(place + 8, &pairs[1], sizeof(pairs[1]));
    }
  }
  const float size = std::fabs(all[0]);
  if (size >= kLeastScale && size <= kLargestScale && std::count(all, all + kPanel, all[0]) == kPanel) {
    all[kFloat8MarkAt] = std::numeric_limits<float>::quiet_NaN();
    std::memcpy(&all[kFloat8SmallAt], &fours_with_small, sizeof(fours_with_small));
  }
  std::memcpy(target, all, sizeof(all));
  return is_finite;
}

}  // namespace

bool pack_float8(WeightFormat format, const StoredRows& rows, const InputChunks& chunks, char* panels) {
  const PanelUnit unit = panel_unit(format, chunks.chunk_inputs);
  const int64_t num_units = chunks.num_inputs / unit.inputs;
  const int64_t scale_stride = num_units * static_cast<int64_t>(sizeof(float));
  std::atomic<bool> is_finite = true;
  parallel_for(count_panels(rows.count), [&](int64_t p) {
    const int count = static_cast<int>(std::min<int64_t>(kPanel, rows.count - p * kPanel));
    const uint8_t* codes = rows.blocks + p * kPanel * rows.stride;
    const char* scales = rows.scales + p * kPanel * scale_stride;
    for (int64_t index = 0; index < num_units; ++index) {
      if (!pack_unit(codes + index * unit.inputs, rows.stride, scales + index * static_cast<int64_t>(sizeof(float)),
                     scale_stride, count, unit.inputs, panels + (p * num_units + index) * unit.bytes)) {
        is_finite = false;
      }
    }
  });
  return is_finite;
}

}  // namespace moeserve
