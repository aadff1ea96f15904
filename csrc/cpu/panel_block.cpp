// Writing of blocks into panels.

#include "panel_block.h"

#include <cstring>

namespace moeserve {

namespace {

constexpr int kGroupWords = kInputGroup / 4;

// Write the codes [kPanel][kInputGroup] of a group.
void write_codes(const uint8_t (*codes)[kInputGroup], int high_bits, char* target) {
  uint32_t words[kPanel][kGroupWords];
  std::memcpy(words, codes, sizeof(words));
  uint32_t low[kGroupWords][kPanel / 2];
  for (int c = 0; c < kPanel / 2; ++c) {
    for (int step = 0; step < kGroupWords; ++step) {
      low[step][c] = (words[c][step] & 0x0F0F0F0Fu) | (words[c + kPanel / 2][step] & 0x0F0F0F0Fu) << 4;
    }
  }
  std::memcpy(target, low, sizeof(low));
  if (high_bits == 0) return;
  const int steps = 8 / high_bits;  // in a byte
  uint32_t high[2][kPanel] = {};
  for (int n = 0; n < kPanel; ++n) {
    for (int step = 0; step < kGroupWords; ++step) {
      const uint32_t bits = words[n][step] >> 4 & (high_bits == 1 ? 0x01010101u : 0x03030303u);
      high[step / steps][n] |= bits << step % steps * high_bits;
    }
  }
  std::memcpy(target + sizeof(low), high, static_cast<size_t>(high_bits) * kPanel * 4);
}

}  // namespace

void write_block(WeightFormat format, const PanelBlock& block, int groups, char* target) {
  const BlockLayout layout = traits_of(format).blocks;
  std::memcpy(target, block.factors, sizeof(block.factors));
  if (layout.has_minima) {
    std::memcpy(target + sizeof(block.factors), block.factors_of_minima, sizeof(block.factors_of_minima));
    char* pairs = target + layout.minima_at();
    std::memset(pairs, 0, layout.scales_at(groups) - layout.minima_at());
    for (int group = 0; group < groups; ++group) {
      for (int n = 0; n < kPanel; ++n) {
        pairs[group / 2 * 2 * kPanel + 2 * n + group % 2] = static_cast<char>(block.minima[group][n]);
      }
    }
  }
  std::memcpy(target + layout.scales_at(groups), block.scales, groups * kInputGroup / layout.scale_inputs * kPanel);
  for (int group = 0; group < groups; ++group) {
    write_codes(block.codes[group], layout.high_bits, target + layout.codes_at(groups) + group * layout.group_bytes());
  }
}

}  // namespace moeserve
