// Pairs of a token and one of its experts: sorted, their rows gathered, their outputs summed up. Plain arrays in and
// out; knows no Python.

#pragma once

#include <cstdint>

#include "element_type.h"

namespace moeserve {

// P pairs with a key each, from 0 to num_keys - 1, or -1 for one that is left out.
struct PairSort {
  const int64_t* keys;  // [P]
  int64_t num_pairs;
  int64_t num_keys;
  int64_t* order;   // [P], gets the pairs in the order of their keys, those of one key ascending
  int64_t* counts;  // [num_keys], gets how many pairs each key has
};

// Returns how many pairs are not left out: so many numbers `order` has then. Throws std::invalid_argument for a key out
// of range.
int64_t sort_pairs(const PairSort& sort);

// Row r of `out` gets row indices[r] / divisor of `source`.
struct RowGather {
  int64_t element_bytes;
  const void* source;      // [S, D]
  int64_t source_stride;   // from row to row, in elements
  const int64_t* indices;  // [R]
  void* out;               // [R, D]
  int64_t num_source_rows;
  int64_t num_rows;
  int64_t width;
  int64_t divisor;
};

// Throws std::invalid_argument for an index out of range.
void gather_rows(const RowGather& gather);

// T tokens, K pairs of each, R rows, D width.
struct WeightedSum {
  ElementType type;            // of rows and out: float32 or bfloat16
  const void* rows;            // [R, D]
  const int64_t* pair_of_row;  // [R]: t * K + k, each at most once
  const float* weights;        // [T, K]
  void* out;                   // [T, D]
  int64_t num_tokens;
  int64_t top_k;
  int64_t num_rows;
  int64_t width;
};

// Each token's rows times their weights, rounded to float32, added in float32, in the order of k, and rounded once
// more. A pair without a row adds zero. The bytes are the same with every instruction set. Throws std::invalid_argument
// for a pair out of range.
void weighted_sum(const WeightedSum& sum);

}  // namespace moeserve
