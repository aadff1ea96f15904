// Products of rows with packed weights, for one weight or many side by side. Plain arrays in and out; knows no Python.

#pragma once

#include <cstdint>
#include <vector>

#include "element_type.h"
#include "packed_weight.h"

namespace moeserve {

enum class Activation {
  kNone,
  kSwiGLU,         // silu(gate) * up
  kClampedSwiGLU,  // g * sigmoid(alpha * g) * (u + 1), g at most `limit` and u within +- limit
};

// Rows that one weight is applied to.
struct RowGroup {
  const char* panels;
  const void* bias;  // [N] of the type of rows, or null
  const char* input;
  char* output;
  int64_t num_rows;
};

// output[r] = activation(input[r] @ weight.T + bias) for the rows of each group.
//
// With an activation, a weight's first N / 2 outputs are gates and the others ups, each half packed by itself, and the
// output has N / 2 columns.
//
// An output's products are added up in the order of K, whatever else is computed beside it: its bytes depend on its
// row, its weights and the instruction set alone.
struct PackedProduct {
  WeightFormat format;
  ElementType type;  // of rows: float32 or bfloat16; that of the weights where these are not quantised
  Activation activation;
  float alpha;
  float limit;
  int64_t num_outputs;   // N
  int64_t num_inputs;    // K
  int64_t input_stride;  // elements from row to row
  int64_t output_stride;
};

void packed_product(const PackedProduct& product, const std::vector<RowGroup>& groups);

}  // namespace moeserve
