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

// Round to nearest bfloat16, ties to even, as floats. Inputs are finite and do not overflow.
template <int W>
MOESERVE_INLINE Float<W> round_to_bfloat16(Float<W> x) {
  const auto bits = reinterpret_cast<typename Vector<W>::UInt>(x);
  return reinterpret_cast<Float<W>>((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000u);
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

// Return the midpoint between the values of neighbouring codes.
constexpr float int4_border(int code) { return 0.5f * (kInt4Values[code] + kInt4Values[code + 1]); }

// Return the value nearest to each quotient: the sum of the gaps below it.
template <int W>
MOESERVE_INLINE Float<W> nearest_int4(Float<W> quotients) {
  constexpr float kSteep = 1e30f;
  Float<W> values = broadcast<W>(kInt4Values[0]);
  MOESERVE_UNROLL
  for (int code = 0; code < 15; ++code) {
    const Float<W> gap = broadcast<W>(kInt4Values[code + 1] - kInt4Values[code]);
    const Float<W> beyond = larger<W>((quotients - int4_border(code)) * kSteep, Float<W>{});
    values += beyond < gap ? beyond : gap;
  }
  return values;
}

// Scales of W outputs in a group of inputs, and their squared errors.
template <int W>
struct Int4Scales {
  Float<W> scales;
  Float<W> errors;
  Float<W> fitted;  // least-squares scales for the chosen codes
};

template <int W>
MOESERVE_INLINE Int4Scales<W> try_int4_scales(const float* weights, Float<W> wanted) {
  const Float<W> scales = round_to_bfloat16<W>(wanted);
  const Float<W> inverses = inverse_or_zero<W>(scales);
  Float<W> errors = {};
  Float<W> products = {};
  Float<W> squares = {};
  for (int k = 0; k < kInputGroup; ++k) {
    const Float<W> weight = load<W>(weights + k * kPanel);
    const Float<W> values = nearest_int4<W>(weight * inverses);
    const Float<W> error = weight - values * scales;
    errors += error * error;
    products += weight * values;
    squares += values * values;
  }
  return {scales, errors, products / squares};  // no value is 0
}

// Choose the best of several scales that map the weight of largest magnitude near the value of the first code, and of
// the least-squares scale for its codes.
template <int W>
MOESERVE_INLINE Float<W> choose_int4_scales(const float* weights) {
  Float<W> extreme = {};
  for (int k = 0; k < kInputGroup; ++k) {
    const Float<W> candidate = load<W>(weights + k * kPanel);
    extreme = magnitude<W>(candidate) > magnitude<W>(extreme) ? candidate : extreme;
  }
  Int4Scales<W> best = try_int4_scales<W>(weights, extreme * (1.0f / (kInt4Values[0] * 0.95f)));
  for (const float part : {0.85f, 1.05f}) {
    const Int4Scales<W> other = try_int4_scales<W>(weights, extreme * (1.0f / (kInt4Values[0] * part)));
    best.scales = other.errors < best.errors ? other.scales : best.scales;
    best.fitted = other.errors < best.errors ? other.fitted : best.fitted;
    best.errors = other.errors < best.errors ? other.errors : best.errors;
  }
  const Int4Scales<W> last = try_int4_scales<W>(weights, best.fitted);
  return last.errors < best.errors ? last.scales : best.scales;
}

template <int W>
MOESERVE_INLINE void choose_int4_codes(const float* weights, Float<W> scales, int32_t* codes) {
  using Int = typename Vector<W>::Int;
  const Float<W> inverses = inverse_or_zero<W>(scales);
  for (int k = 0; k < kInputGroup; ++k) {
    const Float<W> quotients = load<W>(weights + k * kPanel) * inverses;
    Int chosen = {};
    MOESERVE_UNROLL
    for (int border = 0; border < 15; ++border) chosen -= quotients > int4_border(border);  // true is -1
    std::memcpy(codes + k * kPanel, &chosen, sizeof(chosen));
  }
}

template <int W>
MOESERVE_INLINE void pack_int4(const Columns& columns, char* panel) {
  for (int64_t first = 0; first < columns.num_inputs; first += kInputGroup, panel += kInt4GroupBytes) {
    const float* weights = columns.weights.data() + first * kPanel;
    BFloat16 scales[kPanel];
    int32_t codes[kInputGroup * kPanel];
    for (int n = 0; n < kPanel; n += W) {
      float lanes[W];
      store<W>(lanes, choose_int4_scales<W>(weights + n));
      for (int i = 0; i < W; ++i) assign(scales + n + i, lanes[i]);
      choose_int4_codes<W>(weights + n, load<W>(lanes), codes + n);
    }
    auto* bytes = reinterpret_cast<uint8_t*>(panel);
    for (int k = 0; k < kInputGroup; ++k) {
      for (int c = 0; c < kPanel / 2; ++c) {
        const int32_t* near = codes + k * kPanel + c;
        bytes[k / 4 * 2 * kPanel + 4 * c + k % 4] = static_cast<uint8_t>(near[0] | near[kPanel / 2] << 4);
      }
    }
    std::memcpy(panel + kInt4ScalesAt, scales, sizeof(scales));
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
