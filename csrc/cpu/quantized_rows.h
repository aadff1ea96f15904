// Rows quantised to 8 bits, for products with quantised weights.
//
// Each group of 128 inputs of a row has one scale, 1/127 of its largest magnitude. A row with a NaN or an infinity in a
// group gets the scale NaN there, so its products are NaN.

#pragma once

#include <cstdint>

#include "element_type.h"
#include "isa.h"

namespace moeserve {

constexpr int kRowGroup = 128;  // inputs that share a scale

// Of the inputs of one block of a product.
struct RowScale {
  float scale;
  int32_t start;  // -128 times the sum of the quantised values: where a sum begins whose weights have 128 added
};

// The memory of a quantised row: its values, and then a RowScale for each block.
//
// Four values make a step. With VPDPBUSD they are four bytes; otherwise 16-bit integers, in the order 0, 2, 1, 3.
struct QuantizedRowLayout {
  int64_t num_inputs;    // filled up with zeros to whole steps
  int64_t block_inputs;  // inputs of a RowScale; divides kRowGroup or is equal to it
  bool is_widened;       // values are 16-bit integers

  int64_t step_bytes() const { return is_widened ? 8 : 4; }
  int64_t num_blocks() const { return (num_inputs + block_inputs - 1) / block_inputs; }
  int64_t scales_at() const { return (num_inputs / 4 * step_bytes() + 7) / 8 * 8; }
  int64_t row_bytes() const {
    return (scales_at() + num_blocks() * static_cast<int64_t>(sizeof(RowScale)) + 63) / 64 * 64;
  }
};

// Quantise rows [num_rows, num_inputs] of float32 or bfloat16. `source_stride` is in elements, `target_stride` in
// bytes.
void quantize_rows(ElementType type, const char* source, int64_t source_stride, int64_t num_rows, int64_t num_inputs,
                   const QuantizedRowLayout& layout, char* target, int64_t target_stride);

}  // namespace moeserve
