// Packing of weights panel by panel, with quantisation.

#include "packed_weight.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "isa.h"
#include "lanes.h"
#include "parallel.h"

namespace moeserve {

namespace {

constexpr int kInt8Highest = 127;

int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

template <int W>
MOESERVE_INLINE Float<W> magnitude(Float<W> x) {
  return x > 0.0f ? x : -x;
}

template <int W>
MOESERVE_INLINE Float<W> round_to_integer(Float<W> x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  return (x + kRound) - kRound;
}

template <int W>
MOESERVE_INLINE Float<W> inverse_or_zero(Float<W> x) {
  return x != 0.0f ? 1.0f / x : Float<W>{};
}

// The weights of one panel, [num_inputs][kPanel], filled up with zeros. Outputs are side by side, for vectorisation.
struct Columns {
  std::vector<float> weights;
  int64_t num_inputs;
};

template <int W>
MOESERVE_INLINE void pack_int8(const Columns& columns, char* panel) {
  auto* scales = reinterpret_cast<float*>(panel + columns.num_inputs * kPanel);
  float inverses[kPanel];
  for (int n = 0; n < kPanel; n += W) {
    Float<W> largest = {};
    for (int64_t k = 0; k < columns.num_inputs; ++k) {
      largest = larger<W>(magnitude<W>(load<W>(columns.weights.data() + k * kPanel + n)), largest);
    }
    store<W>(scales + n, largest * (1.0f / kInt8Highest));
    store<W>(inverses + n, inverse_or_zero<W>(load<W>(scales + n)));
  }
  for (int64_t k = 0; k < columns.num_inputs; k += 4) {
    float rounded[4][kPanel];
    for (int i = 0; i < 4; ++i) {
      for (int n = 0; n < kPanel; n += W) {
        const Float<W> weights = load<W>(columns.weights.data() + (k + i) * kPanel + n);
        store<W>(rounded[i] + n, round_to_integer<W>(weights * load<W>(inverses + n)) + kByteOffset);
      }
    }
    auto* bytes = reinterpret_cast<uint8_t*>(panel) + k * kPanel;
    for (int n = 0; n < kPanel; ++n) {
      for (int i = 0; i < 4; ++i) bytes[4 * n + i] = static_cast<uint8_t>(rounded[i][n]);
    }
  }
}

MOESERVE_INLINE uint16_t half_bits(float value) {
  // Round a number that is not negative to nearest float16, ties to even.
  uint32_t bits;
  value *= 1 / kFloat16Exponent;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>((bits + 0xFFF + ((bits >> 13) & 1)) >> 13);
}

MOESERVE_INLINE float half_value(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 13;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value * kFloat16Exponent;
}

// Pack each group of inputs with the scale and zero point that cover its range.
template <int W>
MOESERVE_INLINE void pack_int4(const Columns& columns, char* panel) {
  for (int64_t first = 0; first < columns.num_inputs; first += kInputGroup, panel += kInt4GroupBytes) {
    const float* weights = columns.weights.data() + first * kPanel;
    auto* bytes = reinterpret_cast<uint8_t*>(panel);
    std::fill_n(bytes, kInt4ScalesAt, 0);
    for (int n = 0; n < kPanel; ++n) {
      float lowest = 0.0f;
      float highest = 0.0f;
      for (int k = 0; k < kInputGroup; ++k) {
        lowest = std::min(lowest, weights[k * kPanel + n]);
        highest = std::max(highest, weights[k * kPanel + n]);
      }
      const uint16_t scale_bits = half_bits((highest - lowest) / 15);
      const float scale = half_value(scale_bits);
      const float inverse = scale > 0 ? 1 / scale : 0.0f;
      const float zero = std::nearbyint(-lowest * inverse / kInt4ZeroStep);
      for (int k = 0; k < kInputGroup; ++k) {
        const float code = std::nearbyint(weights[k * kPanel + n] * inverse + zero * kInt4ZeroStep);
        const int bounded = static_cast<int>(std::clamp(code, 0.0f, 15.0f));
        bytes[k / 4 * 2 * kPanel + 4 * (n % 16) + k % 4] |= static_cast<uint8_t>(bounded << (n / 16 * 4));
      }
      std::memcpy(panel + kInt4ScalesAt + 2 * n, &scale_bits, sizeof(scale_bits));
      panel[kInt4ZerosAt + n] = static_cast<char>(static_cast<int>(zero) + kInt4ZeroOffset);
    }
  }
}

template <int W>
MOESERVE_INLINE void pack_columns(WeightFormat format, const Columns& columns, char* panel) {
  format == WeightFormat::kInt8 ? pack_int8<W>(columns, panel) : pack_int4<W>(columns, panel);
}

MOESERVE_DEFINE_VARIANTS(pack_columns, (WeightFormat format, const Columns& columns, char* panel),
                         (format, columns, panel))

template <typename Element>
void pack_plain(const Element* source, int num_rows, int64_t num_inputs, int64_t padded, Element* panel) {
  constexpr int kTogether = sizeof(Element) == 2 ? 2 : 1;
  for (int64_t k = 0; k < padded; k += kTogether) {
    for (int n = 0; n < kPanel; ++n) {
      for (int i = 0; i < kTogether; ++i) {
        const bool is_there = n < num_rows && k + i < num_inputs;
        panel[(k * kPanel) + n * kTogether + i] = is_there ? source[n * num_inputs + k + i] : Element{};
      }
    }
  }
}

// Pack panels of the type of the weight. Two inputs of a bfloat16 weight move as one word.
template <typename Element>
void pack_same(const Element* source, int num_rows, int64_t num_inputs, int64_t padded, char* panel) {
  std::vector<Element> copy(source, source + num_rows * num_inputs);  // `panel` may be `source`
  if (sizeof(Element) == 2 && num_rows == kPanel && num_inputs == padded) {
    const auto* words = reinterpret_cast<const uint32_t*>(copy.data());
    auto* target = reinterpret_cast<uint32_t*>(panel);
    const int64_t num_words = num_inputs / 2;
    for (int64_t first = 0; first < num_words; first += 16) {  // one cache line of each row at a time
      const int64_t last = std::min(first + 16, num_words);
      for (int64_t k = first; k < last; ++k) {
        for (int n = 0; n < kPanel; ++n) target[k * kPanel + n] = words[n * num_words + k];
      }
    }
    return;
  }
  pack_plain(copy.data(), num_rows, num_inputs, padded, reinterpret_cast<Element*>(panel));
}

template <typename Element>
void pack_panel(WeightFormat format, const Element* source, int num_rows, int64_t num_inputs, char* panel) {
  const int64_t padded = padded_inputs(format, num_inputs);
  if (format == WeightFormat::kFloat32 || format == WeightFormat::kBFloat16) {
    return pack_same(source, num_rows, num_inputs, padded, panel);
  }
  Columns columns{std::vector<float>(kPanel * padded), padded};
  constexpr int64_t kTogether = 16;  // inputs: rows and columns stay in the cache
  for (int64_t first = 0; first < num_inputs; first += kTogether) {
    const int64_t last = std::min(first + kTogether, num_inputs);
    for (int n = 0; n < num_rows; ++n) {
      for (int64_t k = first; k < last; ++k) columns.weights[k * kPanel + n] = widen(source[n * num_inputs + k]);
    }
  }
  choose_pack_columns(current_isa())(format, columns, panel);
}

// Pack each chunk of a panel as a panel of its own.
template <typename Element>
void pack_chunks(WeightFormat format, const Element* source, int num_rows, const InputChunks& chunks, char* panel) {
  if (chunks.count() == 1) return pack_panel(format, source, num_rows, chunks.num_inputs, panel);
  std::vector<Element> copy;
  for (int64_t chunk = 0; chunk < chunks.count(); ++chunk, source += chunks.chunk_inputs) {
    const int64_t size = chunks.size(chunk);
    copy.resize(num_rows * size);
    for (int n = 0; n < num_rows; ++n) std::copy_n(source + n * chunks.num_inputs, size, copy.data() + n * size);
    pack_panel(format, copy.data(), num_rows, size, panel);
    panel += panel_bytes(format, size);
  }
}

}  // namespace

int64_t count_panels(int64_t num_outputs) { return (num_outputs + kPanel - 1) / kPanel; }

int64_t padded_inputs(WeightFormat format, int64_t num_inputs) {
  switch (format) {
    case WeightFormat::kFloat32:
      return num_inputs;
    case WeightFormat::kBFloat16:
      return round_up(num_inputs, 2);
    case WeightFormat::kInt8:
    case WeightFormat::kInt4:
      break;
  }
  return round_up(num_inputs, kInputGroup);
}

int64_t panel_bytes(WeightFormat format, int64_t num_inputs) {
  const int64_t padded = padded_inputs(format, num_inputs);
  switch (format) {
    case WeightFormat::kFloat32:
      return padded * kPanel * 4;
    case WeightFormat::kBFloat16:
      return padded * kPanel * 2;
    case WeightFormat::kInt8:
      return padded * kPanel + kPanel * 4;
    case WeightFormat::kInt4:
      break;
  }
  return padded / kInputGroup * kInt4GroupBytes;
}

int64_t panel_bytes(WeightFormat format, const InputChunks& chunks) {
  const int64_t last = chunks.count() - 1;
  return last * panel_bytes(format, chunks.chunk_inputs) + panel_bytes(format, chunks.size(last));
}

int64_t padded_inputs(WeightFormat format, const InputChunks& chunks) {
  const int64_t last = chunks.count() - 1;
  return last * padded_inputs(format, chunks.chunk_inputs) + padded_inputs(format, chunks.size(last));
}

void pack_weight(WeightFormat format, ElementType source_type, const void* source, int64_t num_outputs,
                 InputChunks chunks, void* panels) {
  const bool is_plain = format == WeightFormat::kFloat32 || format == WeightFormat::kBFloat16;
  if (is_plain && padded_inputs(format, chunks.chunk_inputs) == chunks.chunk_inputs) {
    chunks.chunk_inputs = chunks.num_inputs;  // the same layout
  }
  const int64_t bytes = panel_bytes(format, chunks);
  parallel_for(count_panels(num_outputs), [&](int64_t p) {
    const int num_rows = static_cast<int>(std::min<int64_t>(kPanel, num_outputs - p * kPanel));
    char* panel = static_cast<char*>(panels) + p * bytes;
    const int64_t first = p * kPanel * chunks.num_inputs;
    if (source_type == ElementType::kBFloat16) {
      pack_chunks(format, static_cast<const BFloat16*>(source) + first, num_rows, chunks, panel);
    } else {
      pack_chunks(format, static_cast<const float*>(source) + first, num_rows, chunks, panel);
    }
  });
}

}  // namespace moeserve
