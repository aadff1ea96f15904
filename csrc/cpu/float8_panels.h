// Decoding of panels in FP8 to numbers in bfloat16, which have the bits of a dequantised weight.
//
// A number is rounded twice: the product of code and scale to float32, then to bfloat16.

#pragma once

#include <cstdint>
#include <cstring>

#include "byte_lanes.h"
#include "float8_rows.h"
#include "lanes.h"
#include "product_tile.h"
#include "weight_format.h"

namespace moeserve {

// If all outputs have the same scale, the first float of a unit is this scale, float kFloat8MarkAt is NaN, and the bits
// of float kFloat8SmallAt are 1 for the fours of inputs for which an output has one of the 8 smallest codes.
constexpr int kFloat8MarkAt = 1;
constexpr int kFloat8SmallAt = 2;

constexpr int64_t kFloat8Inputs = traits_of(WeightFormat::kFp8).unit_inputs;
constexpr int64_t kFloat8Ahead = 4096;  // distance at which codes are prefetched, in bytes

// Four inputs of W outputs as words of bfloat16: the first two of each output, and the other two.
template <int W>
struct FourInputs {
  typename Vector<W>::UInt first;
  typename Vector<W>::UInt second;
};

// The values of the codes of subnormal numbers, and of the first normal numbers.
struct Float8Values {
  float subnormal[16] = {};
  float normal[16] = {};
};

constexpr Float8Values values_of_float8() {
  Float8Values values{};
  for (int code = 0; code < 16; ++code) {
    values.subnormal[code] = code < 8 ? code / 512.0f : 0.0f;
    values.normal[code] = (8 + code % 8) * (code < 8 ? 1.0f : 2.0f) / 1024;  // with the exponent's other bits 0
  }
  return values;
}

// Round to bfloat16 in the high half of each lane. The low half is undefined.
template <int W>
MOESERVE_INLINE typename Vector<W>::UInt round_number(Float<W> number) {
  const auto bits = reinterpret_cast<typename Vector<W>::UInt>(number);
  return bits + 0x7FFFu + (bits >> 16 & 1u);
}

// Decodes codes that have one scale, with tables of the numbers' bytes by the low 4 bits of a code: the mantissa, and
// the last bit of the exponent. The other 3 bits of the exponent are added to the high byte. The 8 smallest codes, of
// zero and of subnormal numbers, have tables of their own, which are used only where a unit says so.
template <int W>
struct TableDecoder {
  typedef uint8_t Bytes __attribute__((vector_size(W * 4)));
  using UInt = typename Vector<W>::UInt;
  static constexpr Float8Values kValues = values_of_float8();
  // Sign and exponent, without its last bit, as they are added to a high byte.
  static constexpr ByteTable kSigns{{0, 1, 2, 3, 4, 5, 6, 7, 128, 129, 130, 131, 132, 133, 134, 135}};
  UInt low, high, subnormal_low, subnormal_high, signs;
  uint32_t fours_with_small;

  static MOESERVE_INLINE void fill(const float* values, float scale, UInt& low, UInt& high) {
    typedef uint8_t Lanes __attribute__((vector_size(W)));
    ByteTable low_bytes, high_bytes;
    for (int i = 0; i < 16; i += W) {
      const UInt bits = round_number<W>(load<W>(values + i) * scale);
      const Lanes low_lanes = __builtin_convertvector(bits >> 16 & 0xFFu, Lanes);
      const Lanes high_lanes = __builtin_convertvector(bits >> 24, Lanes);
      std::memcpy(low_bytes.bytes + i, &low_lanes, sizeof(low_lanes));
      std::memcpy(high_bytes.bytes + i, &high_lanes, sizeof(high_lanes));
    }
    low = broadcast_table<W>(low_bytes);
    high = broadcast_table<W>(high_bytes);
  }
  static MOESERVE_INLINE TableDecoder of(float scale, uint32_t fours_with_small) {
    TableDecoder decoder;
    fill(kValues.normal, scale, decoder.low, decoder.high);
    fill(kValues.subnormal, scale, decoder.subnormal_low, decoder.subnormal_high);
    decoder.signs = broadcast_table<W>(kSigns);
    decoder.fours_with_small = fours_with_small;
    return decoder;
  }
  static MOESERVE_INLINE UInt add(const UInt& a, const UInt& b) {
    return reinterpret_cast<UInt>(reinterpret_cast<Bytes>(a) + reinterpret_cast<Bytes>(b));
  }
  // Return the numbers of the four inputs from input `k` of the unit on.
  MOESERVE_INLINE FourInputs<W> decode(const UInt& codes, int64_t k, int) const {
    const UInt magnitudes = codes & 0x7F7F7F7Fu;
    UInt lows = look_up_or_zero<W>(low, magnitudes);
    UInt highs = look_up_or_zero<W>(high, magnitudes);
    if (fours_with_small >> (k / 4) & 1) {
      const auto is_small = reinterpret_cast<UInt>(reinterpret_cast<Bytes>(magnitudes) < 8);
      lows = (look_up_or_zero<W>(subnormal_low, magnitudes) & is_small) | (lows & ~is_small);
      highs = (look_up_or_zero<W>(subnormal_high, magnitudes) & is_small) | (highs & ~is_small);
    }
    const UInt signed_highs = add(highs, look_up_or_zero<W>(signs, codes >> 4 & 0x0F0F0F0Fu));
    return {interleave_low<W>(lows, signed_highs), interleave_high<W>(lows, signed_highs)};
  }
};

// Decodes codes with a scale for each output.
template <int W>
struct ScaleDecoder {
  using UInt = typename Vector<W>::UInt;
  const float* scales;

  // Codes are in the high bytes of both halves of a word.
  static MOESERVE_INLINE UInt decode_pairs(const UInt& pairs, Float<W> scale) {
    const Float<W> shift = broadcast<W>(kExponentShift);
    const UInt first = round_number<W>(decode_lanes<W>(pairs << 16, shift) * scale);
    const UInt second = round_number<W>(decode_lanes<W>(pairs, shift) * scale);
    return first >> 16 | (second & 0xFFFF0000u);
  }
  MOESERVE_INLINE FourInputs<W> decode(const UInt& codes, int64_t, int v) const {
    const Float<W> scale = load<W>(scales + v * W);
    return {decode_pairs(interleave_low<W>(UInt{}, codes), scale),
            decode_pairs(interleave_high<W>(UInt{}, codes), scale)};
  }
};

// Call run(decoder) with the decoder of a unit of a panel.
template <int W, typename Run>
MOESERVE_INLINE void with_decoder(const char* unit, const Run& run) {
  const auto* scales = reinterpret_cast<const float*>(unit);
  if (scales[kFloat8MarkAt] != scales[kFloat8MarkAt]) {
    uint32_t fours_with_small;
    std::memcpy(&fours_with_small, scales + kFloat8SmallAt, sizeof(fours_with_small));
    run(TableDecoder<W>::of(scales[0], fours_with_small));
  } else {
    run(ScaleDecoder<W>{scales});
  }
}

// Decode a unit of a panel to a panel [num_inputs / 2][32][2] of bfloat16.
template <int W>
MOESERVE_INLINE void decode_unit(const char* unit, int64_t num_inputs, char* target) {
  with_decoder<W>(unit, [&](const auto& decoder) __attribute__((always_inline)) {
    const char* codes = unit + kFloat8CodesAt;
    for (int64_t k = 0; k < num_inputs; k += 4, target += 8 * kPanel) {
      for (int v = 0; v < kPanel / W; ++v, codes += 4 * W) {
        __builtin_prefetch(codes + kFloat8Ahead);
        const FourInputs<W> numbers = decoder.decode(load_words<W>(codes), k, v);
        std::memcpy(target + v * 4 * W, &numbers.first, sizeof(numbers.first));
        std::memcpy(target + 4 * kPanel + v * 4 * W, &numbers.second, sizeof(numbers.second));
      }
    }
  });
}

}  // namespace moeserve
