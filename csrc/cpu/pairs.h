// Pairs of a token and one of its experts: sorted, their rows gathered, their outputs summed up. Plain arrays in and
// out; knows no Python.

#pragma once

#include <cstdint>

#include "element_type.h"

namespace moeserve {

// P pairs with a key each, one of num_known, or -1. Those that have another key than the num_keys from first_key on
// are left out.
struct PairSort {
  ElementType type;  // of the keys: int32 or int64
  const void* keys;  // [T, K], P = T * K pairs
  int64_t keys_per_token;
  int64_t token_stride;  // from token to token, in elements
  int64_t num_tokens;
  int64_t first_key;
  int64_t num_keys;
  int64_t num_known;  // at least first_key + num_keys
  int64_t* order;     // [P], gets the pairs in the order of their keys, those of one key ascending; and then -1
  int64_t* counts;    // [num_keys], gets how many pairs each key has
};

// Returns how many pairs are not left out: so many numbers `order` has then. Throws std::invalid_argument for a key
// that is not known.
int64_t sort_pairs(const PairSort& sort);

// Adds to each total a count, which may have been counted by `sort_pairs`.
struct CountAddition {
  const int64_t* counts;  // [num_keys]
  int64_t* totals;        // [num_keys]
  int64_t num_keys;
};

void add_counts(const CountAddition& addition);

// Which copy of its experts each token gets: of expert e, token t the one in turn (first_token + t) % num_turns[e].
struct CopyChoice {
  const int64_t* experts;    // [T, K]; -1 is nobody, and stays so
  const int64_t* copies;     // [E, W]
  const int64_t* num_turns;  // [E], from 1 to W
  int64_t* chosen;           // [T, K]
  int64_t first_token;
  int64_t num_tokens;
  int64_t top_k;
  int64_t num_experts;
  int64_t max_turns;
};

// Throws std::invalid_argument for an expert or a number of turns out of range.
void choose_copies(const CopyChoice& choice);

// Row r of `out` gets row indices[r] / divisor of `source`; where the index is -1, it stays as it is.
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

// Row indices[r] of `out` gets row r of `source`, but for indices of -1. All other rows of `out` become zeros.
struct RowScatter {
  int64_t row_bytes;
  const void* source;      // [R, D]
  const int64_t* indices;  // [R], each but -1 once
  void* out;               // [P, D]
  int64_t num_rows;
  int64_t num_out_rows;
};

// Throws std::invalid_argument for an index out of range.
void scatter_rows(const RowScatter& scatter);

// Row r of `out` gets row r of one tensor, and then of the other.
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
