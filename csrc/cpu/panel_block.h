// A block of a panel: the codes, scales and factors of 32 outputs, before they are written in the order of products.

#pragma once

#include <cstdint>

#include "weight_format.h"

namespace moeserve {

struct PanelBlock {
  uint8_t codes[kMaxBlockInputs / kInputGroup][kPanel][kInputGroup];
  int8_t scales[kMaxBlockInputs / 16][kPanel];  // one for each `BlockLayout::scale_inputs`
  uint8_t minima[kMaxBlockInputs / kInputGroup][kPanel];
  uint16_t factors[kPanel];            // bits of float16
  uint16_t factors_of_minima[kPanel];  // of formats with minima
};

// Write the first `groups` groups of 32 inputs of a block in a format with blocks. Scales that a smaller block of the
// format does not have are ignored.
void write_block(WeightFormat format, const PanelBlock& block, int groups, char* target);

}  // namespace moeserve
