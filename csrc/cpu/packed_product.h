// Products of rows with one or several packed weights.

#pragma once

#include <cstdint>
#include <vector>

#include "element_type.h"
#include "weight_format.h"

namespace moeserve {

enum class Activation {
  kNone,
  kSwiGLU,         // silu(gate) * up
  kClampedSwiGLU,  // g * sigmoid(alpha * g) * (u + 1), with g <= limit and |u| <= limit
  kLimitedSwiGLU,  // min(silu(gate), limit) * up, with |up| <= limit
  kCutSwiGLU,      // silu(g) * u, with g <= limit and |u| <= limit
  kSquaredReLU,    // max(u, 0) squared, without gates
  kGeGLU,          // gelu(gate) * up, with the approximation of gelu by tanh
  kCappedSwiGLU,   // cap(g, alpha) * sigmoid(g) * cap(u, limit), where cap(x, c) = c * tanh(x / c)
};

// Return true if half of the outputs are gates of the others.
constexpr bool is_gated(Activation activation) {
  return activation != Activation::kNone && activation != Activation::kSquaredReLU;
}

constexpr int kMaxInputChunks = 8;

// Rows that are multiplied by the same weight.
struct RowGroup {
  const char* panels;
  const void* bias;  // [N] in the type of the rows, or null
  const char* input;
  char* output;
  int64_t num_rows;
};

inline int64_t count_rows(const std::vector<RowGroup>& groups) {
  int64_t num_rows = 0;
  for (const RowGroup& group : groups) num_rows += group.num_rows;
  return num_rows;
}

// output[r] = activation(input[r] @ weight.T + bias) for the rows of each group.
//
// With a gated activation, the first N / 2 outputs of a weight are gates and the others ups, each half packed
// separately, and the output has N / 2 columns.
//
// The products of each chunk of inputs are added in the order of K. The sums of the chunks are added in a binary tree:
// neighbours first, ((0 + 1) + (2 + 3)) + ..., where the last chunk may lack a neighbour. A bias is added to the sum of
// the first chunk. The bytes of an output therefore depend only on its row, its weights, the size of the chunks and the
// instruction set.
//
// Ranks that each have 1, 2, 4 or 8 of the chunks compute nodes of this tree. The sum of their float32 outputs, added
// in the same way, has the same bytes as the output of a single rank.
struct PackedProduct {
  WeightFormat format;
  ElementType type;         // type of the rows, and of unquantised weights: float32 or bfloat16
  ElementType output_type;  // `type`, or float32 without an activation
  Activation activation;
  float alpha;
  float limit;
  int64_t num_outputs;   // N
  int64_t num_inputs;    // K
  int64_t chunk_inputs;  // inputs per chunk, fewer in the last; at most kMaxInputChunks chunks
  int64_t input_stride;  // distance between rows in elements
  int64_t output_stride;

  InputChunks chunks() const { return {num_inputs, chunk_inputs}; }
};

// Rows that are gathered: row r of all groups together is row indices[r] / divisor of the source. A source row is
// prepared once, however often it is gathered.
struct GatheredRows {
  const char* source;  // [num_rows, K]
  int64_t num_rows;
  const int64_t* indices;
  int64_t divisor;
};

// The inputs of the groups are `gathered`, unless that is null.
void packed_product(const PackedProduct& product, const std::vector<RowGroup>& groups,
                    const GatheredRows* gathered = nullptr);

}  // namespace moeserve
