// Packs weights panel by panel, quantises them on the way, and widens parts of them again.

#include "packed_weight.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "isa.h"
#include "lanes.h"
#include "parallel.h"

namespace moeserve {

namespace {

constexpr int kInt4Words = kInt4ScalesAt / 2;
constexpr int kInt4Lowest = -8;
constexpr int kInt4Highest = 7;
constexpr int kInt8Highest = 127;

int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

BFloat16 to_bfloat16(float value) {
  BFloat16 rounded;
  assign(&rounded, value);
  return rounded;
}

// Of one output's weights, the number that each is divided by, and the quotients.
float quantize_int8(const float* weights, int64_t num_inputs, int8_t* values) {
  float largest = 0;
  for (int64_t k = 0; k < num_inputs; ++k) largest = std::max(largest, std::fabs(weights[k]));
  const float scale = largest / kInt8Highest;
  const float inverse = scale > 0 ? 1 / scale : 0;
  for (int64_t k = 0; k < num_inputs; ++k) {
    const float rounded = std::nearbyint(weights[k] * inverse);
    values[k] = static_cast<int8_t>(std::clamp<float>(rounded, -kInt8Highest, kInt8Highest));
  }
  return scale;
}

// The squared error of a group with this scale; fills in the values.
float quantize_int4(const float* weights, float scale, int8_t* values) {
  const float inverse = scale != 0 ? 1 / scale : 0;
  float error = 0;
  for (int i = 0; i < kInt4Group; ++i) {
    const float rounded = std::nearbyint(weights[i] * inverse);
    const float value = std::clamp<float>(rounded, kInt4Lowest, kInt4Highest);
    values[i] = static_cast<int8_t>(value);
    error += (weights[i] - value * scale) * (weights[i] - value * scale);
  }
  return error;
}

// Tries scales that bring the weight of largest magnitude to -8 or a little further, and keeps the best.
BFloat16 choose_int4(const float* weights, int8_t* values) {
  float extreme = 0;
  for (int i = 0; i < kInt4Group; ++i) {
    if (std::fabs(weights[i]) > std::fabs(extreme)) extreme = weights[i];
  }
  BFloat16 best{0};
  float least = std::numeric_limits<float>::infinity();
  int8_t tried[kInt4Group];
  for (const float end : {-8.0f, -7.0f, -7.5f, -8.5f, -9.0f, 7.0f, 7.5f}) {
    const BFloat16 scale = to_bfloat16(extreme / end);
    const float error = quantize_int4(weights, widen(scale), tried);
    if (error < least) {
      least = error;
      best = scale;
      std::memcpy(values, tried, sizeof(tried));
    }
  }
  return best;
}

// One panel's weights as rows of floats, those that are filled up being zero.
struct Rows {
  std::vector<float> weights;  // [kPanel, num_inputs]
  int64_t num_inputs;

  const float* row(int n) const { return weights.data() + n * num_inputs; }
};

void pack_int8(const Rows& rows, char* panel) {
  auto* values = reinterpret_cast<int8_t*>(panel);
  auto* scales = reinterpret_cast<float*>(panel + rows.num_inputs * kPanel);
  std::vector<int8_t> quantized(rows.num_inputs);
  for (int n = 0; n < kPanel; ++n) {
    scales[n] = quantize_int8(rows.row(n), rows.num_inputs, quantized.data());
    for (int64_t k = 0; k < rows.num_inputs; ++k) values[k / 2 * 2 * kPanel + n * 2 + k % 2] = quantized[k];
  }
}

void pack_int4(const Rows& rows, char* panel) {
  for (int64_t first = 0; first < rows.num_inputs; first += kInt4Group, panel += kInt4GroupBytes) {
    uint16_t words[kInt4Words] = {};
    BFloat16 scales[kPanel];
    int8_t values[kInt4Group];
    for (int n = 0; n < kPanel; ++n) {
      scales[n] = choose_int4(rows.row(n) + first, values);
      for (int k = 0; k < kInt4Group; ++k) {
        const int value_of_word = k % 4 / 2 * 2 + n / 16;
        words[k / 4 * 32 + n % 16 * 2 + k % 2] |= static_cast<uint16_t>((values[k] & 15) << (4 * value_of_word));
      }
    }
    std::memcpy(panel, words, sizeof(words));
    std::memcpy(panel + sizeof(words), scales, sizeof(scales));
  }
}

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

// Panels of the weight's own type. Two inputs of a bfloat16 weight move as one word.
template <typename Element>
void pack_same(const Element* source, int num_rows, int64_t num_inputs, int64_t padded, char* panel) {
  std::vector<Element> copy(source, source + num_rows * num_inputs);  // `panel` may be `source`
  if (sizeof(Element) == 2 && num_rows == kPanel && num_inputs == padded) {
    const auto* words = reinterpret_cast<const uint32_t*>(copy.data());
    auto* target = reinterpret_cast<uint32_t*>(panel);
    const int64_t num_words = num_inputs / 2;
    for (int64_t first = 0; first < num_words; first += 16) {  // a cache line of each row at a time
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
  Rows rows{std::vector<float>(kPanel * padded), padded};
  for (int n = 0; n < num_rows; ++n) {
    for (int64_t k = 0; k < num_inputs; ++k) rows.weights[n * padded + k] = widen(source[n * num_inputs + k]);
  }
  format == WeightFormat::kInt8 ? pack_int8(rows, panel) : pack_int4(rows, panel);
}

}  // namespace

int64_t count_panels(int64_t num_outputs) { return (num_outputs + kPanel - 1) / kPanel; }

int64_t padded_inputs(WeightFormat format, int64_t num_inputs) {
  switch (format) {
    case WeightFormat::kFloat32:
      return num_inputs;
    case WeightFormat::kBFloat16:
    case WeightFormat::kInt8:
      return round_up(num_inputs, 2);
    case WeightFormat::kInt4:
      break;
  }
  return round_up(num_inputs, kInt4Group);
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
  return padded / kInt4Group * kInt4GroupBytes;
}

void pack_weight(WeightFormat format, ElementType source_type, const void* source, int64_t num_outputs,
                 int64_t num_inputs, void* panels) {
  const int64_t bytes = panel_bytes(format, num_inputs);
  parallel_for(count_panels(num_outputs), [&](int64_t p) {
    const int num_rows = static_cast<int>(std::min<int64_t>(kPanel, num_outputs - p * kPanel));
    char* panel = static_cast<char*>(panels) + p * bytes;
    const int64_t first = p * kPanel * num_inputs;
    if (source_type == ElementType::kBFloat16) {
      pack_panel(format, static_cast<const BFloat16*>(source) + first, num_rows, num_inputs, panel);
    } else {
      pack_panel(format, static_cast<const float*>(source) + first, num_rows, num_inputs, panel);
    }
  });
}

}  // namespace moeserve
