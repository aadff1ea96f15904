// Rows quantised to 8 bits, for products with quantised weights.
//
// Each block of 32 to 256 inputs of a row has one scale, 1/127 of its largest magnitude. If a block contains a NaN or
// an infinity, its scale is NaN, so the products of the row are NaN.

#pragma once

#include <cstdint>

#include "element_type.h"
#include "weight_format.h"

namespace moeserve {

// The scale of one group of 32 inputs.
struct RowScale {
  float scale;
  float sum;  // exact sum of the quantised values
};

// The memory layout of a quantised row: its values, followed by a RowScale for each group.
//
// For weights in blocks the values are followed by the float32 scales of the blocks, by four sums of each group of 32,
// and by the sum of each group, in 16 bits. The four are of the first and second pairs of words in both halves of a
// group: of values 0, 1, 4, 5, ..., 13, of values 2, 3, 6, ..., 15, and the same from value 16 on.
//
// A step has four values. With VPDPBUSD they are four bytes; otherwise they are 16-bit integers in the order 0, 2, 1,
// 3.
struct QuantizedRowLayout {
  int64_t num_inputs;    // padded with zeros to whole blocks
  int64_t block_inputs;  // inputs that share a scale
  bool has_blocks;       // the weights have blocks
  bool is_widened;       // values are 16-bit integers

  int64_t step_bytes() const { return is_widened ? 8 : 4; }
  int64_t num_groups() const { return num_inputs / kInputGroup; }
  int64_t scales_at() const { return num_inputs / 4 * step_bytes(); }
  int64_t scale_bytes() const { return has_blocks ? sizeof(float) : sizeof(RowScale); }
  int64_t quarters_at() const { return scales_at() + num_inputs / block_inputs * scale_bytes(); }
  int64_t sums_at() const { return quarters_at() + num_groups() * 4 * static_cast<int64_t>(sizeof(int16_t)); }
  int64_t row_bytes() const {
    const int64_t last = static_cast<int64_t>(sizeof(int16_t));  // pairs of sums are read
    return ((has_blocks ? sums_at() + num_groups() * last + last : quarters_at()) + 63) / 64 * 64;
  }
};

// Quantise rows [num_rows, num_inputs] of float32 or bfloat16. `source_stride` is in elements, `target_stride` in
// bytes.
void quantize_rows(ElementType type, const char* source, int64_t source_stride, int64_t num_rows, int64_t num_inputs,
                   const QuantizedRowLayout& layout, char* target, int64_t target_stride);

}  // namespace moeserve
