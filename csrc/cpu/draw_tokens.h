// The random choice of one token for each row of scores.

#pragma once

#include <cstdint>

namespace moeserve {

struct DrawTokens {
  const float* scores;  // [R, width]; minus infinity is never drawn, no score is NaN
  int64_t row_stride;   // in elements
  int64_t num_rows;
  int64_t width;              // below 2^31
  const float* temperatures;  // [R], above zero
  const int64_t* top_k;       // [R]; 0 or less keeps all
  const float* top_p;         // [R]
  const float* min_p;         // [R]
  const double* uniform;      // [R], in [0, 1)
  int64_t* tokens;            // [R]
};

// Write the token of each row. Tokens are ordered by score, and ties by id. First `min_p`, then `top_k`, then `top_p`
// keep a beginning of the row. The token drawn is the one at `uniform` times the kept probability.
void draw_tokens(const DrawTokens& draw);

}  // namespace moeserve
