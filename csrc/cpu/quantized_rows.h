// Rows quantised to 8 bits, for products with quantised weights.
//
// Each group of 32 inputs of a row has one scale, 1/127 of its largest magnitude. If a group contains a NaN or an
// infinity, its scale is NaN, so the products of the row are NaN.

#pragma once

#include <cstdint>

#include "element_type.h"
#include "packed_weight.h"

namespace moeserve {

// The scale of one group of inputs.
struct RowScale {
  float scale;
  float sum;  // exact sum of the quantised values
};

// The memory layout of a quantised row: its values, followed by a RowScale for each group.
//
// A step has four values. With VPDPBUSD they are four bytes; otherwise they are 16-bit integers in the order 0, 2, 1,
// 3.
struct QuantizedRowLayout {
  int64_t num_inputs;  // padded with zeros to whole groups
  bool is_widened;     // values are 16-bit integers

  int64_t step_bytes() const { return is_widened ? 8 : 4; }
  int64_t num_groups() const { return num_inputs / kInputGroup; }
  int64_t scales_at() const { return num_inputs / 4 * step_bytes(); }
  int64_t row_bytes() const {
    return (scales_at() + num_groups() * static_cast<int64_t>(sizeof(RowScale)) + 63) / 64 * 64;
  }
};

// Quantise rows [num_rows, num_inputs] of float32 or bfloat16. `source_stride` is in elements, `target_stride` in
// bytes.
void quantize_rows(ElementType type, const char* source, int64_t source_stride, int64_t num_rows, int64_t num_inputs,
                   const QuantizedRowLayout& layout, char* target, int64_t target_stride);

}  // namespace moeserve
