// Packing of GGUF weights into panels. Codes and scales keep their values; only their order changes.
//
// Source of the blocks' layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h

#include <atomic>
#include <cstring>

#include "parallel.h"
#include "weight_format.h"

namespace moeserve {

namespace {

constexpr int kGroupWords = kInputGroup / 4;

// Read the 32 codes of a group of a block.
template <WeightFormat kFormat>
void read_codes(const uint8_t* block, int group, uint8_t* codes) {
  constexpr StoredBlock kStored = traits_of(kFormat).stored;
  const uint8_t* low = block + kStored.low_at;
  const uint8_t* high = block + kStored.high_at;
  if constexpr (kFormat == WeightFormat::kQ6_K) {  // two halves of four groups: those of low bits, those of high bits
    low += group / 4 * 64 + group % 2 * kInputGroup;
    high += group / 4 * kInputGroup;
    const int low_shift = group % 4 / 2 * 4, high_shift = group % 4 * 2;
    for (int i = 0; i < kInputGroup; ++i) {
      codes[i] = static_cast<uint8_t>((low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4);
    }
  } else if constexpr (kFormat == WeightFormat::kIQ4_XS || kFormat == WeightFormat::kQ5_0) {
    low += group * 16;
    for (int i = 0; i < 16; ++i) {
      codes[i] = low[i] & 15;
      codes[i + 16] = low[i] >> 4;
    }
    for (int i = 0; kFormat == WeightFormat::kQ5_0 && i < kInputGroup; ++i) codes[i] |= (high[i / 8] >> i % 8 & 1) << 4;
  } else {
    low += group / 2 * kInputGroup;
    const int shift = group % 2 * 4;
    for (int i = 0; i < kInputGroup; ++i) {
      const int above = kFormat == WeightFormat::kQ5_K ? (high[i] >> group & 1) << 4 : 0;
      codes[i] = static_cast<uint8_t>((low[i] >> shift & 15) | above);
    }
  }
}

// Return scale `index` of a block, or with `minimum` the minimum of that group.
template <WeightFormat kFormat>
int read_scale(const uint8_t* block, int index, bool minimum) {
  const uint8_t* scales = block + traits_of(kFormat).stored.scales_at;
  if constexpr (kFormat == WeightFormat::kQ5_0) return 1;
  if constexpr (kFormat == WeightFormat::kQ6_K) return static_cast<int8_t>(scales[index]);
  if constexpr (kFormat == WeightFormat::kIQ4_XS) {
    const int high = scales[index / 4] >> index % 4 * 2 & 3;
    return ((scales[2 + index / 2] >> index % 2 * 4 & 15) | high << 4) - 32;
  }
  if (index < 4) return scales[index + 4 * minimum] & 63;
  const int low = scales[index + 4] >> 4 * minimum & 15;
  return low | scales[index - 4 + 4 * minimum] >> 6 << 4;
}

// Write the codes [kPanel][kInputGroup] of a group.
void write_codes(const uint8_t* codes, int high_bits, uint8_t* target) {
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

// Copy the float16 number at byte `place` of each output's block. Return false if a number is not finite.
bool copy_halves(const uint8_t* const* blocks, int place, char* target) {
  bool is_finite = true;
  for (int n = 0; n < kPanel; ++n) {
    uint16_t half = 0;
    if (blocks[n] != nullptr) std::memcpy(&half, blocks[n] + place, sizeof(half));
    is_finite &= (half & 0x7C00) != 0x7C00;
    std::memcpy(target + 2 * n, &half, sizeof(half));
  }
  return is_finite;
}

// Pack `groups` groups of the blocks of 32 outputs, from group `first` of the blocks on. Null: an output is padding.
template <WeightFormat kFormat>
bool pack_block(const uint8_t* const* blocks, int first, int groups, char* target) {
  constexpr BlockLayout kLayout = traits_of(kFormat).blocks;
  constexpr StoredBlock kStored = traits_of(kFormat).stored;
  uint8_t codes[kPanel][kInputGroup] = {};
  for (int group = 0; group < groups; ++group) {
    for (int n = 0; n < kPanel; ++n) {
      if (blocks[n] != nullptr) read_codes<kFormat>(blocks[n], first + group, codes[n]);
    }
    auto* bytes = reinterpret_cast<uint8_t*>(target + kLayout.codes_at(groups) + group * kLayout.group_bytes());
    write_codes(codes[0], kLayout.high_bits, bytes);
  }
  std::memset(target, 0, kLayout.codes_at(groups));
  for (int n = 0; n < kPanel; ++n) {
    if (blocks[n] == nullptr) continue;
    constexpr int kPerGroup = kInputGroup / kLayout.scale_inputs;
    char* scales = target + kLayout.scales_at(groups) + n;
    for (int i = 0; i < groups * kPerGroup; ++i) {
      scales[i * kPanel] = static_cast<char>(read_scale<kFormat>(blocks[n], first * kPerGroup + i, false));
    }
    char* minima = target + kLayout.minima_at() + 2 * n;
    for (int i = 0; kLayout.has_minima && i < groups; ++i) {
      minima[i / 2 * 2 * kPanel + i % 2] = static_cast<char>(read_scale<kFormat>(blocks[n], first + i, true));
    }
  }
  const bool is_finite = copy_halves(blocks, kStored.factors_at, target);
  return !kLayout.has_minima ? is_finite
                             : copy_halves(blocks, kStored.factors_at + 2, target + 2 * kPanel) && is_finite;
}

template <>
bool pack_block<WeightFormat::kQ8_0>(const uint8_t* const* blocks, int, int, char* target) {
  uint32_t words[kGroupWords][kPanel] = {};
  for (int n = 0; n < kPanel; ++n) {
    for (int step = 0; blocks[n] != nullptr && step < kGroupWords; ++step) {
      std::memcpy(&words[step][n], blocks[n] + 2 + 4 * step, 4);
      words[step][n] ^= 0x80808080u;
    }
  }
  std::memcpy(target, words, sizeof(words));
  return copy_halves(blocks, 0, target + kQ8ScalesAt);
}

template <WeightFormat kFormat>
bool pack_rows(const StoredRows& rows, const InputChunks& chunks, char* panels) {
  constexpr StoredBlock kStored = traits_of(kFormat).stored;
  const PanelUnit unit = panel_unit(kFormat, chunks.chunk_inputs);
  std::atomic<bool> is_finite = true;
  parallel_for(count_panels(rows.count), [&](int64_t p) {
    char* target = panels + p * panel_bytes(kFormat, chunks);
    for (int64_t k = 0; k < chunks.num_inputs; k += unit.inputs, target += unit.bytes) {
      const int64_t input = rows.first_input + k;
      const uint8_t* blocks[kPanel];
      for (int n = 0; n < kPanel; ++n) {
        const int64_t row = p * kPanel + n;
        const uint8_t* block = rows.blocks + row * rows.stride + input / kStored.inputs * kStored.num_bytes;
        blocks[n] = row < rows.count ? block : nullptr;
      }
      const int first = static_cast<int>(input % kStored.inputs / kInputGroup);
      if (!pack_block<kFormat>(blocks, first, static_cast<int>(unit.inputs / kInputGroup), target)) is_finite = false;
    }
  });
  return is_finite;
}

// Call pack_rows of a format, searched from number `kFirst` on.
template <int kFirst = 0>
bool pack_rows_of(WeightFormat format, const StoredRows& rows, const InputChunks& chunks, char* panels) {
  if constexpr (kFirst < kNumFormats) {
    constexpr auto kFormat = static_cast<WeightFormat>(kFirst);
    if constexpr (traits_of(kFormat).pack_stored == pack_gguf) {
      if (format == kFormat) return pack_rows<kFormat>(rows, chunks, panels);
    }
    return pack_rows_of<kFirst + 1>(format, rows, chunks, panels);
  }
  return false;
}

}  // namespace

bool pack_gguf(WeightFormat format, const StoredRows& rows, const InputChunks& chunks, char* panels) {
  return pack_rows_of(format, rows, chunks, panels);
}

}  // namespace moeserve
