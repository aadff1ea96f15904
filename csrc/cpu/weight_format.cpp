#include "weight_format.h"

#include <numeric>

namespace moeserve {

PanelUnit panel_unit(WeightFormat format, int64_t chunk_inputs) {
  const FormatTraits& traits = traits_of(format);
  const int64_t whole_groups = (chunk_inputs + kInputGroup - 1) / kInputGroup * kInputGroup;
  const int64_t inputs = traits.is_stored() ? std::gcd<int64_t>(traits.unit_inputs, whole_groups) : traits.unit_inputs;
  if (traits.has_blocks()) return {inputs, traits.blocks.block_bytes(static_cast<int>(inputs / kInputGroup))};
  return {inputs, inputs * traits.input_bytes + traits.unit_bytes};
}

int64_t padded_inputs(WeightFormat format, const InputChunks& chunks, int64_t chunk) {
  const int64_t unit = panel_unit(format, chunks.chunk_inputs).inputs;
  return (chunks.size(chunk) + unit - 1) / unit * unit;
}

int64_t panel_bytes(WeightFormat format, const InputChunks& chunks, int64_t chunk) {
  const PanelUnit unit = panel_unit(format, chunks.chunk_inputs);
  return padded_inputs(format, chunks, chunk) / unit.inputs * unit.bytes + traits_of(format).end_bytes;
}

int64_t padded_inputs(WeightFormat format, const InputChunks& chunks) {
  const int64_t last = chunks.count() - 1;
  return last * padded_inputs(format, chunks, 0) + padded_inputs(format, chunks, last);
}

int64_t panel_bytes(WeightFormat format, const InputChunks& chunks) {
  const int64_t last = chunks.count() - 1;
  return last * panel_bytes(format, chunks, 0) + panel_bytes(format, chunks, last);
}

}  // namespace moeserve
