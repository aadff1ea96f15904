// Products of rows with one or many packed weights.

#pragma once

#include <cstdint>
#include <vector>

#include "element_type.h"
#include "packed_weight.h"

namespace moeserve {

enum class Activation {
  kNone,
  kSwiGLU,         // silu(gate) * up
  kClampedSwiGLU,  // g * sigmoid(alpha * g) * (u + 1), with g <= limit and |u| <= limit
};

// Rows that are multiplied with one weight.
struct RowGroup {
  const char* panels;
  const void* bias;  // [N] in the type of the rows, or null
  const char* input;
  char* output;
  int64_t num_rows;
};

// output[r] = activation(input[r] @ weight.T + bias) for the rows of each group.
//
// With an activation, the first N / 2 outputs of a weight are gates and the others ups, each half packed separately,
// and the output has N / 2 columns.
//
// The products of an output are added in the order of K, so its bytes depend on its row, its weights and the
// instruction set alone.
struct PackedProduct {
  WeightFormat format;
  ElementType type;  // type of the rows: float32 or bfloat16; the same as an unquantised weight
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
