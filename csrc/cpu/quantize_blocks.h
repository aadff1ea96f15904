// Quantisation of weights to blocks of Q4_K, Q5_K and Q6_K.

#pragma once

#include "panel_block.h"

namespace moeserve {

// Choose the codes, scales and factors of a block of 32 * `groups` inputs.
//
// They minimise the squared error of each output, weighted by the importances of its inputs: first each group of inputs
// that shares a scale for itself, then with scales as they are stored. The bytes are the same with every instruction
// set.
//
// `weights` are [inputs][kPanel], `importances` [inputs], not negative; null: all inputs are alike.
void quantize_block(WeightFormat format, const float* weights, const float* importances, int groups, PanelBlock& block);

}  // namespace moeserve
