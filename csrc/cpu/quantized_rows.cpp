// Quantisation of rows. The bytes are the same with every instruction set.

#include "quantized_rows.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "lanes.h"
#include "rows.h"

namespace moeserve {

namespace {

constexpr float kHighest = 127.0f;
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves an integer in the low bits

// Return the largest magnitude of a block, or NaN if the block contains one.
template <int W>
MOESERVE_INLINE float largest_magnitude(const float* values, int64_t num_inputs) {
  using Int = typename Vector<W>::Int;
  Int largest = {};  // the bits of magnitudes have the same order, with NaN as the largest
  for (int64_t i = 0; i < num_inputs; i += W) {
    const Int bits = reinterpret_cast<Int>(load<W>(values + i)) & 0x7FFFFFFF;
    largest = bits > largest ? bits : largest;
  }
  int32_t lanes[W];
  std::memcpy(lanes, &largest, sizeof(lanes));
  const int32_t bits = *std::max_element(lanes, lanes + W);
  float magnitude;
  std::memcpy(&magnitude, &bits, sizeof(magnitude));
  return magnitude;
}

constexpr int lane_in_step(int lane) { return lane % 4 == 1 ? lane + 1 : lane % 4 == 2 ? lane - 1 : lane; }

// Write the integers in the low bits of W lanes in the order of the layout.
template <int W, int... kLane>
MOESERVE_INLINE void write_values(Float<W> lanes, bool is_widened, char* target, std::integer_sequence<int, kLane...>) {
  using UInt = typename Vector<W>::UInt;
  typedef uint8_t Bytes __attribute__((vector_size(W)));
  if (is_widened) {
    const auto ordered = reinterpret_cast<UInt>(pick<W, lane_in_step(kLane)...>(lanes, lanes));
    const auto halves = __builtin_convertvector(ordered, typename Vector<W>::HalfAsMany);
    std::memcpy(target, &halves, sizeof(halves));
  } else {
    const Bytes bytes = __builtin_convertvector(reinterpret_cast<UInt>(lanes), Bytes);
    std::memcpy(target, &bytes, sizeof(bytes));
  }
}

// Return the four sums of a group in the first lanes. The arguments are the sums of the values of each half whose
// positions are equal modulo W.
template <int W, int kHalf = W / 2>
MOESERVE_INLINE Float<W> sum_quarters(Float<W> first, Float<W> second) {
  constexpr auto kLanes = std::make_integer_sequence<int, W>{};
  if constexpr (kHalf == 2) {
    return fold<W, 1>(first, second, kLanes);
  } else {
    const Float<W> folded = fold<W, kHalf>(first, second, kLanes);
    return sum_quarters<W, kHalf / 2>(folded, folded);
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
    const int64_t count = std::min(layout.block_inputs, num_inputs - first);
    int64_t i = 0;
    for (; i + W <= count; i += W) store<W>(values + i, load_in_order<W>(source + first + i));
    for (; i < count; ++i) values[i] = widen(source[first + i]);
    for (; i < layout.block_inputs; ++i) values[i] = 0;
    const float highest = largest_magnitude<W>(values, layout.block_inputs);
    const float inverse = highest > 0 ? kHighest / highest : 0.0f;
    const float scale = highest * (1.0f / kHighest) + highest * 0.0f;  // NaN if `highest` is infinite
    std::memcpy(scales, &scale, sizeof(scale));
    for (int64_t group = 0; group < layout.block_inputs; group += kInputGroup) {
      Float<W> halves[2] = {};
      MOESERVE_UNROLL
      for (int k = 0; k < kInputGroup; k += W) {
        const Float<W> rounded = load<W>(values + group + k) * inverse + kRound;
        halves[k / (kInputGroup / 2)] += rounded - kRound;
        write_values<W>(rounded, layout.is_widened, target, std::make_integer_sequence<int, W>{});
        target += W / 4 * layout.step_bytes();
      }
      if (layout.has_blocks) {
        const Float<W> four = sum_quarters<W>(halves[0], halves[1]);
        const auto integers = __builtin_convertvector(four, typename Vector<W>::Int);
        int16_t sum = 0;
        for (int i = 0; i < 4; ++i) {
          quarters[i] = static_cast<int16_t>(integers[i]);
          sum += quarters[i];
        }
        quarters += 4;
        *sums++ = sum;
      } else {
        const float sum = sum_lanes<W>(halves[0] + halves[1]);  // exact
        std::memcpy(scales + sizeof(scale), &sum, sizeof(sum));
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
