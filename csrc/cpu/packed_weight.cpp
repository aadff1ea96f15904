// Packing of weights panel by panel, including quantisation.

#include "packed_weight.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "isa.h"
#include "lanes.h"
#include "panel_block.h"
#include "parallel.h"
#include "quantize_blocks.h"
#include "rounding.h"

namespace moeserve {

namespace {

constexpr int kInt8Highest = 127;

// The weights of one panel, [num_inputs][kPanel], padded with zeros. Outputs are adjacent, for vectorisation.
struct Columns {
  std::vector<float> weights;
  int64_t num_inputs;
  std::vector<float> int4_scales;  // [num_inputs / kInputGroup][kPanel], of int4 only
};

void pack_blocks(WeightFormat format, PanelUnit unit, const Columns& columns, char* panel) {
  PanelBlock block = {};
  const int groups = static_cast<int>(unit.inputs / kInputGroup);
  for (int64_t k = 0; k < columns.num_inputs; k += unit.inputs, panel += unit.bytes) {
    quantize_block(format, columns.weights.data() + k * kPanel, nullptr, groups, block);
    write_block(format, block, groups, panel);
  }
}

// The weights of one panel, [count][num_inputs].
template <typename Element>
struct Rows {
  const Element* weights;
  int count;
  int64_t num_inputs;
  const uint16_t* int4_scales;  // scales of the first row, of int4 only
  int64_t scale_stride;         // distance between rows
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

// Write one group of inputs: scales and zero points [kPanel], and codes [kInputGroup][kPanel].
void write_int4_group(const float* scales, const float* zeros, const float* codes, char* group) {
  auto* bytes = reinterpret_cast<uint8_t*>(group);
  for (int k = 0; k < kInputGroup; ++k) {
    for (int c = 0; c < kPanel / 2; ++c) {
      const float* low = codes + k * kPanel + c;
      const float byte = low[0] + low[kPanel / 2] * 16.0f;
      bytes[k / 4 * 2 * kPanel + 4 * c + k % 4] = static_cast<uint8_t>(byte);
    }
  }
  for (int n = 0; n < kPanel; ++n) {
    const uint16_t scale = float16_bits(scales[n]);
    std::memcpy(group + kInt4ScalesAt + 2 * n, &scale, sizeof(scale));
    bytes[kInt4ZerosAt + n] = static_cast<uint8_t>(zeros[n] * (1.0f / kInt4ZeroStep) + kInt4ZeroOffset);
  }
}

// The numbers that weights of W outputs can have in one group of inputs: (code - zero) * scale for codes 0 to 15.
template <int W>
struct Int4Grid {
  Float<W> scales;
  Float<W> zeros;

  // Return the grid with its scales and zero points as they are stored.
  MOESERVE_INLINE Int4Grid rounded() const {
    const Float<W> steps = round_to_integer<W>(zeros * (1.0f / kInt4ZeroStep)) + kInt4ZeroOffset;
    const Float<W> bounded = steps > 0.0f ? steps : Float<W>{};
    const Float<W> stored = bounded < 255.0f ? bounded : broadcast<W>(255.0f);
    return {round_to_float16<W>(scales), (stored - kInt4ZeroOffset) * kInt4ZeroStep};
  }

  MOESERVE_INLINE Float<W> nearest_codes(Float<W> weights, Float<W> inverse_scales) const {
    const Float<W> codes = round_to_integer<W>(weights * inverse_scales + zeros);
    const Float<W> bounded = codes > 0.0f ? codes : Float<W>{};
    return bounded < kInt4HighestCode ? bounded : broadcast<W>(kInt4HighestCode);
  }
};

// Return the grid for given scales, of which the weights are integer multiples.
template <int W>
MOESERVE_INLINE Int4Grid<W> grid_of_scales(const float* weights, Float<W> scales) {
  const Float<W> inverses = inverse_or_zero<W>(scales);
  Float<W> lowest = load<W>(weights) * inverses;
  for (int k = 1; k < kInputGroup; ++k) {
    const Float<W> integer = load<W>(weights + k * kPanel) * inverses;
    lowest = integer < lowest ? integer : lowest;
  }
  return Int4Grid<W>{scales, -round_to_integer<W>(lowest)}.rounded();
}

template <int W>
MOESERVE_INLINE void pack_int4(const Columns& columns, char* panel) {
  for (int64_t first = 0; first < columns.num_inputs; first += kInputGroup, panel += kInt4GroupBytes) {
    const float* weights = columns.weights.data() + first * kPanel;
    float scales[kPanel];
    float zeros[kPanel];
    float codes[kInputGroup * kPanel];
    for (int n = 0; n < kPanel; n += W) {
      const Int4Grid<W> grid =
          grid_of_scales<W>(weights + n, load<W>(columns.int4_scales.data() + first / kInputGroup * kPanel + n));
      store<W>(scales + n, grid.scales);
      store<W>(zeros + n, grid.zeros);
      const Float<W> inverses = inverse_or_zero<W>(grid.scales);
      for (int k = 0; k < kInputGroup; ++k) {
        const int place = k * kPanel + n;
        store<W>(codes + place, grid.nearest_codes(load<W>(weights + place), inverses));
      }
    }
    write_int4_group(scales, zeros, codes, panel);
  }
}

template <int W>
MOESERVE_INLINE void pack_columns(WeightFormat format, const Columns& columns, char* panel) {
  format == WeightFormat::kInt8 ? pack_int8<W>(columns, panel) : pack_int4<W>(columns, panel);
}

MOESERVE_DEFINE_VARIANTS(pack_columns, (WeightFormat format, const Columns& columns, char* panel),
                         (format, columns, panel))

// Exchange the lanes above the diagonal of W vectors with those below.
template <int W, int kHalf = W / 2, int... kLane>
MOESERVE_INLINE void transpose(Float<W> (&rows)[W], std::integer_sequence<int, kLane...> lanes) {
  if constexpr (kHalf > 0) {
    MOESERVE_UNROLL
    for (int i = 0; i < W; ++i) {
      if ((i & kHalf) != 0) continue;
      const Float<W> upper = rows[i], lower = rows[i + kHalf];
      rows[i] = pick<W, (kLane & kHalf ? kLane - kHalf + W : kLane)...>(upper, lower);
      rows[i + kHalf] = pick<W, (kLane & kHalf ? kLane + W : kLane + kHalf)...>(upper, lower);
    }
    transpose<W, kHalf / 2>(rows, lanes);
  }
}

// Pack kPanel rows of `num_words` words of 32 bits.
template <int W>
MOESERVE_INLINE void transpose_panel(const float* source, int64_t num_words, float* panel) {
  int64_t k = 0;
  for (; k + W <= num_words; k += W) {
    for (int n = 0; n < kPanel; n += W) {
      Float<W> words[W];
      MOESERVE_UNROLL
      for (int i = 0; i < W; ++i) words[i] = load<W>(source + (n + i) * num_words + k);
      transpose<W>(words, std::make_integer_sequence<int, W>{});
      MOESERVE_UNROLL
      for (int i = 0; i < W; ++i) store<W>(panel + (k + i) * kPanel + n, words[i]);
    }
  }
  for (; k < num_words; ++k) {
    for (int n = 0; n < kPanel; ++n) std::memcpy(panel + k * kPanel + n, source + n * num_words + k, sizeof(float));
  }
}

MOESERVE_DEFINE_VARIANTS(transpose_panel, (const float* source, int64_t num_words, float* panel),
                         (source, num_words, panel))

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

// Pack panels in the element type of the weight. One input of a float32 weight is a word, or two of a bfloat16 weight.
template <typename Element>
void pack_same(const Element* source, int num_rows, int64_t num_inputs, int64_t padded, char* panel) {
  std::vector<Element> copy;
  if (static_cast<const void*>(source) == panel) {
    copy.assign(source, source + num_rows * num_inputs);
    source = copy.data();
  }
  if (num_rows == kPanel && num_inputs == padded) {
    const int64_t num_words = num_inputs * sizeof(Element) / sizeof(float);
    choose_transpose_panel(current_isa())(reinterpret_cast<const float*>(source), num_words,
                                          reinterpret_cast<float*>(panel));
  } else {
    pack_plain(source, num_rows, num_inputs, padded, reinterpret_cast<Element*>(panel));
  }
}

template <typename Element>
void pack_panel(WeightFormat format, PanelUnit unit, const Rows<Element>& rows, char* panel) {
  const int64_t num_inputs = rows.num_inputs;
  const int64_t padded = (num_inputs + unit.inputs - 1) / unit.inputs * unit.inputs;
  if (!is_quantized(format)) return pack_same(rows.weights, rows.count, num_inputs, padded, panel);
  Columns columns{std::vector<float>(kPanel * padded), padded, {}};
  constexpr int64_t kTogether = 16;  // inputs at a time, so that rows and columns stay in the cache
  for (int64_t first = 0; first < num_inputs; first += kTogether) {
    const int64_t last = std::min(first + kTogether, num_inputs);
    for (int n = 0; n < rows.count; ++n) {
      for (int64_t k = first; k < last; ++k) columns.weights[k * kPanel + n] = widen(rows.weights[n * num_inputs + k]);
    }
  }
  if (traits_of(format).has_blocks()) return pack_blocks(format, unit, columns, panel);
  if (rows.int4_scales != nullptr) {
    const int64_t num_groups = padded / kInputGroup;
    columns.int4_scales.resize(num_groups * kPanel);
    for (int n = 0; n < rows.count; ++n) {
      for (int64_t group = 0; group < num_groups; ++group) {
        columns.int4_scales[group * kPanel + n] = float16_value(rows.int4_scales[n * rows.scale_stride + group]);
      }
    }
  }
  choose_pack_columns(current_isa())(format, columns, panel);
}

// Pack each chunk of a panel as a separate panel.
template <typename Element>
void pack_chunks(WeightFormat format, const Rows<Element>& rows, const InputChunks& chunks, char* panel) {
  const PanelUnit unit = panel_unit(format, chunks.chunk_inputs);
  if (chunks.count() == 1) return pack_panel(format, unit, rows, panel);
  std::vector<Element> copy;
  for (int64_t chunk = 0; chunk < chunks.count(); ++chunk) {
    const int64_t size = chunks.size(chunk);
    const int64_t first = chunk * chunks.chunk_inputs;
    copy.resize(rows.count * size);
    for (int n = 0; n < rows.count; ++n) {
      std::copy_n(rows.weights + n * rows.num_inputs + first, size, copy.data() + n * size);
    }
    const uint16_t* scales = rows.int4_scales == nullptr ? nullptr : rows.int4_scales + first / kInputGroup;
    pack_panel(format, unit, Rows<Element>{copy.data(), rows.count, size, scales, rows.scale_stride}, panel);
    panel += panel_bytes(format, chunks, chunk);
  }
}

}  // namespace

void pack_weight(WeightFormat format, ElementType source_type, const void* source, const uint16_t* int4_scales,
                 int64_t num_outputs, InputChunks chunks, void* panels) {
  if (!is_quantized(format) && padded_inputs(format, chunks, 0) == chunks.size(0)) {
    chunks.chunk_inputs = chunks.num_inputs;  // a single chunk has the same layout
  }
  const int64_t bytes = panel_bytes(format, chunks);
  const int64_t num_groups = (chunks.num_inputs + kInputGroup - 1) / kInputGroup;
  const auto pack = [&](const auto* weights, int64_t p) {
    using Element = std::decay_t<decltype(*weights)>;
    const int64_t first = p * kPanel;
    const int count = static_cast<int>(std::min<int64_t>(kPanel, num_outputs - first));
    const uint16_t* scales = int4_scales == nullptr ? nullptr : int4_scales + first * num_groups;
    const Rows<Element> rows{weights + first * chunks.num_inputs, count, chunks.num_inputs, scales, num_groups};
    pack_chunks(format, rows, chunks, static_cast<char*>(panels) + p * bytes);
  };
  parallel_for(count_panels(num_outputs), [&](int64_t p) {
    if (source_type == ElementType::kBFloat16) {
      pack(static_cast<const BFloat16*>(source), p);
    } else {
      pack(static_cast<const float*>(source), p);
    }
  });
}

}  // namespace moeserve
