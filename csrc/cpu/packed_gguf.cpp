// Packing of GGUF weights into panels, and quantisation to types of GGUF. Codes and scales of stored weights keep their
// values; only their order changes.
//
// Source of the blocks' layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "lanes.h"
#include "packed_weight.h"
#include "panel_block.h"
#include "parallel.h"
#include "quantize_blocks.h"

namespace moeserve {

namespace {

constexpr int kGroupWords = kInputGroup / 4;

// Return true for the types whose blocks have one group with a factor, and no scales.
constexpr bool has_plain_scales(WeightFormat format) { return traits_of(format).stored.inputs == kInputGroup; }

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
  } else if constexpr (kFormat == WeightFormat::kIQ4_XS || has_plain_scales(kFormat)) {
    low += group * 16;
    for (int i = 0; i < 16; ++i) {
      codes[i] = low[i] & 15;
      codes[i + 16] = low[i] >> 4;
    }
    constexpr bool kHasHighBit = traits_of(kFormat).blocks.high_bits == 1;
    for (int i = 0; kHasHighBit && i < kInputGroup; ++i) codes[i] |= (high[i / 8] >> i % 8 & 1) << 4;
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
  if constexpr (has_plain_scales(kFormat)) return 1;
  if constexpr (kFormat == WeightFormat::kQ6_K) return static_cast<int8_t>(scales[index]);
  if constexpr (kFormat == WeightFormat::kIQ4_XS) {
    const int high = scales[index / 4] >> index % 4 * 2 & 3;
    return ((scales[2 + index / 2] >> index % 2 * 4 & 15) | high << 4) - 32;
  }
  if (index < 4) return scales[index + 4 * minimum] & 63;
  const int low = scales[index + 4] >> 4 * minimum & 15;
  return low | scales[index - 4 + 4 * minimum] >> 6 << 4;
}

// Write the first `groups` groups of output `n` of a block of Q4_K, Q5_K or Q6_K.
template <WeightFormat kFormat>
void store_output(const PanelBlock& block, int n, int groups, uint8_t* stored) {
  constexpr StoredBlock kStored = traits_of(kFormat).stored;
  std::memset(stored, 0, kStored.num_bytes);
  std::memcpy(stored + kStored.factors_at, &block.factors[n], sizeof(uint16_t));
  uint8_t* scales = stored + kStored.scales_at;
  for (int group = 0; group < groups; ++group) {
    const uint8_t* codes = block.codes[group][n];
    uint8_t* low = stored + kStored.low_at;
    uint8_t* high = stored + kStored.high_at;
    if constexpr (kFormat == WeightFormat::kQ6_K) {
      low += group / 4 * 64 + group % 2 * kInputGroup;
      high += group / 4 * kInputGroup;
      for (int i = 0; i < kInputGroup; ++i) {
        low[i] |= (codes[i] & 15) << group % 4 / 2 * 4;
        high[i] |= codes[i] >> 4 << group % 4 * 2;
      }
      for (int i = 2 * group; i < 2 * group + 2; ++i) scales[i] = static_cast<uint8_t>(block.scales[i][n]);
    } else {
      low += group / 2 * kInputGroup;
      for (int i = 0; i < kInputGroup; ++i) {
        low[i] |= (codes[i] & 15) << group % 2 * 4;
        if (kFormat == WeightFormat::kQ5_K) high[i] |= codes[i] >> 4 << group;
      }
      const auto scale = static_cast<uint8_t>(block.scales[group][n]);
      const uint8_t minimum = block.minima[group][n];
      if (group < 4) {
        scales[group] = scale;
        scales[group + 4] = minimum;
      } else {
        scales[group - 4] |= scale >> 4 << 6;
        scales[group] |= minimum >> 4 << 6;
        scales[group + 4] = (scale & 15) | (minimum & 15) << 4;
      }
    }
  }
  if (traits_of(kFormat).blocks.has_minima) {
    std::memcpy(stored + kStored.factors_at + 2, &block.factors_of_minima[n], sizeof(uint16_t));
  }
}

template <WeightFormat kFormat, typename Element>
void quantize_rows(const Element* weights, const float* importances, int64_t num_outputs, int64_t num_inputs,
                   uint8_t* blocks) {
  const int64_t row_bytes = stored_row_bytes(kFormat, num_inputs);
  parallel_for(count_panels(num_outputs), [&](int64_t p) {
    const int64_t first = p * kPanel;
    const int count = static_cast<int>(std::min<int64_t>(kPanel, num_outputs - first));
    PanelBlock block = {};
    std::vector<float> columns(kMaxBlockInputs * kPanel);
    uint8_t* stored = blocks + first * row_bytes;
    for (int64_t k = 0; k < num_inputs; k += kMaxBlockInputs, stored += traits_of(kFormat).stored.num_bytes) {
      const auto size = static_cast<int>(std::min<int64_t>(kMaxBlockInputs, num_inputs - k));
      const int groups = (size + kInputGroup - 1) / kInputGroup;
      float of_inputs[kMaxBlockInputs] = {};
      std::fill(columns.begin(), columns.end(), 0.0f);
      for (int n = 0; n < count; ++n) {
        const Element* row = weights + (first + n) * num_inputs + k;
        for (int i = 0; i < size; ++i) columns[i * kPanel + n] = widen(row[i]);
      }
      if (importances != nullptr) std::copy_n(importances + k, size, of_inputs);
      quantize_block(kFormat, columns.data(), importances == nullptr ? nullptr : of_inputs, groups, block);
      for (int n = 0; n < count; ++n) store_output<kFormat>(block, n, groups, stored + n * row_bytes);
    }
  });
}

// Return the bits of the float16 number at byte `place` of a block. Set `is_finite` to false if it is not finite.
uint16_t read_half(const uint8_t* block, int place, bool& is_finite) {
  uint16_t half;
  std::memcpy(&half, block + place, sizeof(half));
  is_finite &= (half & 0x7C00) != 0x7C00;
  return half;
}

// Pack `groups` groups of the blocks of 32 outputs, from group `first` of the blocks on. Null: an output is padding.
// Return false if a factor is not finite.
template <WeightFormat kFormat>
bool pack_block(const uint8_t* const* blocks, int first, int groups, char* target) {
  constexpr BlockLayout kLayout = traits_of(kFormat).blocks;
  constexpr StoredBlock kStored = traits_of(kFormat).stored;
  constexpr int kPerGroup = kInputGroup / kLayout.scale_inputs;
  PanelBlock block = {};
  bool is_finite = true;
  for (int n = 0; n < kPanel; ++n) {
    const uint8_t* stored = blocks[n];
    if (stored == nullptr) continue;
    for (int group = 0; group < groups; ++group) {
      read_codes<kFormat>(stored, first + group, block.codes[group][n]);
      if (kLayout.has_minima) {
        block.minima[group][n] = static_cast<uint8_t>(read_scale<kFormat>(stored, first + group, true));
      }
    }
    for (int i = 0; i < groups * kPerGroup; ++i) {
      block.scales[i][n] = static_cast<int8_t>(read_scale<kFormat>(stored, first * kPerGroup + i, false));
    }
    block.factors[n] = read_half(stored, kStored.factors_at, is_finite);
    if (kLayout.has_minima) {
      const uint16_t factor = read_half(stored, kStored.factors_at + 2, is_finite);
      block.factors_of_minima[n] = has_plain_scales(kFormat) ? factor ^ 0x8000 : factor;  // stored to be added
    }
  }
  write_block(kFormat, block, groups, target);
  return is_finite;
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
  bool is_finite = true;
  for (int n = 0; n < kPanel; ++n) {
    const uint16_t half = blocks[n] == nullptr ? 0 : read_half(blocks[n], 0, is_finite);
    std::memcpy(target + kQ8ScalesAt + 2 * n, &half, sizeof(half));
  }
  return is_finite;
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

void quantize_gguf(WeightFormat format, ElementType source_type, const void* source, const float* importances,
                   int64_t num_outputs, int64_t num_inputs, uint8_t* blocks) {
  const auto quantize = [&](const auto* weights) {
    if (format == WeightFormat::kQ4_K) {
      quantize_rows<WeightFormat::kQ4_K>(weights, importances, num_outputs, num_inputs, blocks);
    } else if (format == WeightFormat::kQ5_K) {
      quantize_rows<WeightFormat::kQ5_K>(weights, importances, num_outputs, num_inputs, blocks);
    } else {
      quantize_rows<WeightFormat::kQ6_K>(weights, importances, num_outputs, num_inputs, blocks);
    }
  };
  if (source_type == ElementType::kBFloat16) {
    quantize(static_cast<const BFloat16*>(source));
  } else {
    quantize(static_cast<const float*>(source));
  }
}

bool pack_gguf(WeightFormat format, const StoredRows& rows, const InputChunks& chunks, char* panels) {
  return pack_rows_of(format, rows, chunks, panels);
}

}  // namespace moeserve
