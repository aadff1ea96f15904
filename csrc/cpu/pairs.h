// Kernels over pairs of a token and one of its experts: sorting, row copies and weighted sums.

#pragma once

#include <cstdint>

#include "element_type.h"

namespace moeserve {

// P pairs with one key each: -1, or in [0, num_known). Pairs whose key is outside of [first_key, first_key + num_keys)
// are left out.
struct PairSort {
  ElementType type;  // type of the keys: int32 or int64
  const void* keys;  // [T, K], P = T * K pairs
  int64_t keys_per_token;
  int64_t token_stride;  // between tokens, in elements
  int64_t num_tokens;
  int64_t first_key;
  int64_t num_keys;
  int64_t num_known;  // at least first_key + num_keys
  int64_t* order;     // [P]: pairs sorted by key and then by index, padded with -1
  int64_t* counts;    // [num_keys]: number of pairs of each key
};

// Sort the pairs, and return their number. Throws std::invalid_argument for a key out of range.
int64_t sort_pairs(const PairSort& sort);

// totals += counts.
struct CountAddition {
  const int64_t* counts;  // [num_keys]
  int64_t* totals;        // [num_keys]
  int64_t num_keys;
};

void add_counts(const CountAddition& addition);

// Round-robin choice of expert copies: token t uses copy (first_token + t) % num_copies[e] of expert e.
struct CopyChoice {
  const int64_t* experts;     // [T, K]; -1 is padding and stays -1
  const int64_t* copies;      // [E, W]
  const int64_t* num_copies;  // [E], from 1 to W
  int64_t* chosen;            // [T, K]
  int64_t first_token;
  int64_t num_tokens;
  int64_t top_k;
  int64_t num_experts;
  int64_t max_copies;
};

// Throws std::invalid_argument for an expert or a number of copies out of range.
void choose_copies(const CopyChoice& choice);

// Copy row indices[r] / divisor of `source` to row r of `out`. Rows with index -1 stay unchanged.
struct RowGather {
  int64_t element_bytes;
  const void* source;      // [S, D]
  int64_t source_stride;   // between rows, in elements
  const int64_t* indices;  // [R]
  void* out;               // [R, D]
  int64_t num_source_rows;
  int64_t num_rows;
  int64_t width;
  int64_t divisor;
};

// Throws std::invalid_argument for an index out of range.
void gather_rows(const RowGather& gather);

// Copy row r of `source` to row indices[r] of `out`, unless the index is -1. All other rows of `out` are zeroed.
struct RowScatter {
  int64_t row_bytes;
  const void* source;      // [R, D]
  const int64_t* indices;  // [R], unique except for -1
  void* out;               // [P, D]
  int64_t num_rows;
  int64_t num_out_rows;
};

// Throws std::invalid_argument for an index out of range.
void scatter_rows(const RowScatter& scatter);

// Concatenate the bytes of row r of two tensors into row r of `out`.
struct RowJoin {
  const void* first;  // [T, ...]
  const void* second;
  void* out;
  int64_t first_bytes;  // of a row
  int64_t second_bytes;
  int64_t first_stride;  // in bytes
  int64_t second_stride;
  int64_t num_rows;
};

void join_rows(const RowJoin& join);

// T tokens with K pairs each, R rows of width D.
struct WeightedSum {
  ElementType type;            // type of rows and out: float32 or bfloat16
  const void* rows;            // [R, D]
  const int64_t* pair_of_row;  // [R]: t * K + k, each at most once
  const float* weights;        // [T, K]
  void* out;                   // [T, D]
  int64_t num_tokens;
  int64_t top_k;
  int64_t num_rows;
  int64_t width;
};

// Sum the rows of each token, multiplied by their weights. Products are rounded to float32 and added in float32 in the
// order of k; the sum is rounded to the type. A pair without a row adds zero. The bytes are the same with every
// instruction set. Throws std::invalid_argument for a pair out of range.
void weighted_sum(const WeightedSum& sum);

}  // namespace moeserve
