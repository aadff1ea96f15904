// Quantisation of rows. The bytes are the same with every instruction set.

#include "quantized_rows.h"

#include <algorithm>
#include <cstring>

#include "lanes.h"
#include "rows.h"

namespace moeserve {

namespace {

constexpr int kHighest = 127;

// Quantise the values of one block, padded with zeros, and return their scale.
template <int W>
MOESERVE_INLINE float quantize_block(const float* values, int64_t num_inputs, int8_t* quantized) {
  using Int = typename Vector<W>::Int;
  typedef int8_t Bytes __attribute__((vector_size(W)));
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  constexpr int32_t kRoundBits = 0x4B400000;
  Float<W> largest = {};
  Float<W> zeros = {};  // becomes NaN after a NaN
  for (int64_t i = 0; i < num_inputs; i += W) {
    const Float<W> lanes = load<W>(values + i);
    largest = larger<W>(lanes < 0.0f ? -lanes : lanes, largest);
    zeros += lanes * 0.0f;
  }
  const float highest = largest_lane<W>(largest);
  const float inverse = highest > 0 ? kHighest / highest : 0.0f;
  for (int64_t i = 0; i < num_inputs; i += W) {
    const Float<W> rounded = load<W>(values + i) * inverse + kRound;
    const Bytes bytes = __builtin_convertvector(reinterpret_cast<Int>(rounded) - kRoundBits, Bytes);
    std::memcpy(quantized + i, &bytes, sizeof(bytes));
  }
  return highest * (1.0f / kHighest) + sum_lanes<W>(zeros);
}

// Write the values of a group in the order of the layout.
MOESERVE_INLINE void write_values(const int8_t* quantized, bool is_widened, char* target) {
  if (!is_widened) {
    std::memcpy(target, quantized, kInputGroup);
    return;
  }
  for (int step = 0; step < kInputGroup / 4; ++step) {
    const int8_t* four = quantized + 4 * step;
    const int16_t halves[4] = {four[0], four[2], four[1], four[3]};
    std::memcpy(target + 8 * step, halves, sizeof(halves));
  }
}

template <int W, typename Element>
MOESERVE_INLINE void quantize_row(const Element* source, int64_t num_inputs, const QuantizedRowLayout& layout,
                                  char* target) {
  char* scales = target + layout.scales_at();
  auto* quarters = reinterpret_cast<int16_t*>(target + layout.quarters_at());
  auto* sums = reinterpret_cast<int16_t*>(target + layout.sums_at());
  for (int64_t first = 0; first < layout.num_inputs; first += layout.block_inputs) {
    alignas(64) float values[kMaxBlockInputs];
    alignas(64) int8_t quantized[kMaxBlockInputs];
    const int64_t count = std::min(layout.block_inputs, num_inputs - first);
    int64_t i = 0;
    for (; i + W <= count; i += W) store<W>(values + i, load_in_order<W>(source + first + i));
    for (; i < count; ++i) values[i] = widen(source[first + i]);
    for (; i < layout.block_inputs; ++i) values[i] = 0;
    const float scale = quantize_block<W>(values, layout.block_inputs, quantized);
    std::memcpy(scales, &scale, sizeof(scale));
    for (int64_t k = 0; k < layout.block_inputs; k += kInputGroup) {
      write_values(quantized + k, layout.is_widened, target + (first + k) / 4 * layout.step_bytes());
      int16_t four[4] = {};
      for (int n = 0; n < kInputGroup; ++n) four[n / 16 * 2 + n % 4 / 2] += quantized[k + n];
      const int16_t sum = four[0] + four[1] + four[2] + four[3];
      if (layout.has_blocks) {
        std::copy_n(four, 4, quarters);
        quarters += 4;
        *sums++ = sum;
      } else {
        const float of_group = sum;
        std::memcpy(scales + sizeof(scale), &of_group, sizeof(of_group));
      }
    }
    scales += layout.scale_bytes();
  }
  if (layout.has_blocks) *sums = 0;
}

template <int W, typename Element>
MOESERVE_INLINE void quantize_range(ElementType, const char* source, int64_t stride, int64_t num_rows,
                                    int64_t num_inputs, const QuantizedRowLayout& layout, char* target,
                                    int64_t target_stride) {
  for (int64_t row = 0; row < num_rows; ++row, target += target_stride) {
    quantize_row<W>(reinterpret_cast<const Element*>(source) + row * stride, num_inputs, layout, target);
  }
}

MOESERVE_DEFINE_TYPED_VARIANTS(quantize_range, type,
                               (ElementType type, const char* source, int64_t stride, int64_t num_rows,
                                int64_t num_inputs, const QuantizedRowLayout& layout, char* target,
                                int64_t target_stride),
                               (type, source, stride, num_rows, num_inputs, layout, target, target_stride))

}  // namespace

void quantize_rows(ElementType type, const char* source, int64_t source_stride, int64_t num_rows, int64_t num_inputs,
                   const QuantizedRowLayout& layout, char* target, int64_t target_stride) {
  const auto run = choose_quantize_range_of_type(current_isa());
  const int64_t stride_bytes = source_stride * element_bytes(type);
  for_rows(num_rows, 4 * num_inputs, [&](int64_t first, int64_t last) {
    run(type, source + first * stride_bytes, source_stride, last - first, num_inputs, layout,
        target + first * target_stride, target_stride);
  });
}

}  // namespace moeserve
