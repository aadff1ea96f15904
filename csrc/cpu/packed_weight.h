// Packing of weights from numbers. Formats that keep stored codes have a packer of their own: see `kFormats`.

#pragma once

#include <cstdint>

#include "element_type.h"
#include "weight_format.h"

namespace moeserve {

// Pack a row-major weight [N, K], float32 or bfloat16, into panels, on several threads. `source` may be the memory of
// the panels if the format keeps the type, and neither N nor the chunks of K need padding.
//
// int4 needs `int4_scales`, the bits of nonnegative float16 scales [N, groups of 32 inputs]. Weights near integer
// multiples of these scales, where the integers of a group span fewer than 16, become exactly those multiples. Chunks
// must then consist of whole groups.
void pack_weight(WeightFormat format, ElementType source_type, const void* source, const uint16_t* int4_scales,
                 int64_t num_outputs, InputChunks chunks, void* panels);

// Quantise the row-major rows [N, K] of a weight, float32 or bfloat16, to Q4_K, Q5_K or Q6_K: `blocks` are
// [N, stored_row_bytes]. `importances` [K], which may be null, weight the errors of the inputs: see quantize_blocks.h.
void quantize_gguf(WeightFormat format, ElementType source_type, const void* source, const float* importances,
                   int64_t num_outputs, int64_t num_inputs, uint8_t* blocks);

}  // namespace moeserve
