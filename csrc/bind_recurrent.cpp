// Bindings of the kernels of layers that keep a state for each request.

#include <nanobind/stl/optional.h>

#include <optional>

#include "arguments.h"
#include "bindings.h"
#include "cpu/linear_attention.h"
#include "cpu/selective_scan.h"
#include "cpu/short_convolution.h"
#include "cpu_graph.h"

namespace nb = nanobind;

namespace moeserve {

namespace {

ChunkStates read_chunks(const Tensor& row_starts, const Tensor& load, const Tensor& store, const Tensor& save,
                        const Tensor& num_before_save) {
  check_dims("row_starts", row_starts, 1);
  const int64_t num_chunks = row_starts.size(0) - 1;
  check_array("row_starts", row_starts, {num_chunks + 1}, ElementType::kInt32, "int32");
  check_array("load", load, {num_chunks}, ElementType::kInt64, "int64");
  check_array("store", store, {num_chunks}, ElementType::kInt64, "int64");
  check_array("save", save, {num_chunks}, ElementType::kInt64, "int64");
  check_array("num_before_save", num_before_save, {num_chunks}, ElementType::kInt64, "int64");
  return {numbers<int32_t>(row_starts),      numbers<int64_t>(load),
          numbers<int64_t>(store),           numbers<int64_t>(save),
          numbers<int64_t>(num_before_save), num_chunks};
}

void convolve_rows(const Tensor& input, const Tensor& taps, const std::optional<Tensor>& bias, const Tensor& states,
                   const Tensor& row_starts, const Tensor& load, const Tensor& store, const Tensor& save,
                   const Tensor& num_before_save, const Tensor& out, bool is_gated, bool is_linear,
                   const std::optional<Tensor>& scale, const std::optional<Tensor>& token_taps) {
  check_dims("input", input, 2);
  check_float_type("input", input);
  check_contiguous("input", input, 1);
  check_dims("taps", taps, 2);
  const int64_t num_taps = taps.size(0), num_channels = taps.size(1);
  if (num_taps < 1 || num_taps > kMaxTaps) {
    refuse("taps of shape " + shape_text(taps) + ", but there must be 1 to " + std::to_string(kMaxTaps) + " taps");
  }
  check_shape("input", input, {input.size(0), (is_gated ? 3 : 1) * num_channels});
  check_array("taps", taps, {num_taps, num_channels}, ElementType::kFloat32, "float32");
  if (bias) check_array("bias", *bias, {num_channels}, ElementType::kFloat32, "float32");
  check_dims("states", states, 3);
  check_array("states", states, {states.size(0), num_taps - 1, num_channels}, input.type, "input's");
  if (scale) check_array("scale", *scale, {1}, ElementType::kFloat32, "float32");
  if (token_taps) {
    check_dims("token_taps", *token_taps, 3);
    const int64_t num_groups = token_taps->size(1);
    check_array("token_taps", *token_taps, {input.size(0), num_groups, num_taps}, input.type, "input's");
    if (num_groups < 1 || num_channels % num_groups != 0) {
      refuse("token_taps of shape " + shape_text(*token_taps) + " do not divide " + std::to_string(num_channels) +
             " channels");
    }
  }
  if (is_gated || is_linear) {
    check_array("out", out, {input.size(0), num_channels}, input.type, "input's");
  } else {
    check_array("out", out, {input.size(0), num_channels}, ElementType::kFloat32, "float32");
  }

  ShortConvolution step{};
  step.type = input.type;
  step.input = input.data;
  step.row_stride = input.strides[0];
  step.taps = numbers<float>(taps);
  step.bias = bias ? numbers<float>(*bias) : nullptr;
  step.states = states.data;
  step.out = out.data;
  step.num_channels = num_channels;
  step.num_taps = static_cast<int>(num_taps);
  step.is_gated = is_gated;
  step.is_linear = is_linear;
  step.scale = scale ? numbers<float>(*scale) : nullptr;
  step.token_taps = token_taps ? token_taps->data : nullptr;
  step.group_size = token_taps ? num_channels / token_taps->size(1) : num_channels;
  step.chunks = read_chunks(row_starts, load, store, save, num_before_save);
  run_kernel([step] { short_convolution(step); });
}

// Return the distance of rows of a matrix [T, num_columns], which must have the type of the gates.
int64_t check_rows(const char* name, const Tensor& rows, const Tensor& gates, int64_t num_columns) {
  check_dims(name, rows, 2);
  check_shape(name, rows, {gates.size(0), num_columns});
  check_type(name, rows, gates.type, "gates'");
  check_contiguous(name, rows, 1);
  return rows.strides[0];
}

void attend(const Tensor& mixed, const Tensor& gates, const Tensor& decays, const std::optional<Tensor>& rates,
            const Tensor& log_decay, const Tensor& decay_bias, const std::optional<Tensor>& skip, const Tensor& norm,
            const Tensor& states, const Tensor& row_starts, const Tensor& load, const Tensor& store, const Tensor& save,
            const Tensor& num_before_save, const Tensor& outputs, const Tensor& out, int64_t norm_heads,
            double norm_epsilon, double decay_floor, bool gates_with_sigmoid, bool gates_before_norm) {
  check_dims("states", states, 4);
  const int64_t num_heads = states.size(1), key_dim = states.size(2), value_dim = states.size(3);
  check_array("states", states, {states.size(0), num_heads, key_dim, value_dim}, ElementType::kFloat32, "float32");
  if (key_dim > kMaxLinearHead || value_dim > kMaxLinearHead) {
    refuse("states of shape " + shape_text(states) + ", but heads have at most " + std::to_string(kMaxLinearHead) +
           " values");
  }
  check_dims("gates", gates, 2);
  check_float_type("gates", gates);
  const int64_t num_tokens = gates.size(0), value_size = num_heads * value_dim;
  check_dims("mixed", mixed, 2);
  const int64_t width = mixed.size(1), num_key_heads = (width - value_size) / (2 * key_dim);
  if (num_key_heads < 1 || width != 2 * num_key_heads * key_dim + value_size || num_heads % num_key_heads != 0) {
    refuse("mixed of shape " + shape_text(mixed) + " does not fit states of shape " + shape_text(states));
  }
  if (norm_heads < 1 || num_heads % norm_heads != 0) {
    refuse("norm_heads=" + std::to_string(norm_heads) + " does not divide " + std::to_string(num_heads) + " heads");
  }
  check_array("mixed", mixed, {num_tokens, width}, ElementType::kFloat32, "float32");
  check_dims("decays", decays, 2);
  const bool has_channel_decays = decays.size(1) != num_heads;
  if (has_channel_decays && !rates) refuse("decays of each channel are for the delta rule only, which needs rates");
  const int64_t num_decays = num_heads * (has_channel_decays ? key_dim : 1);
  check_array("log_decay", log_decay, {num_heads}, ElementType::kFloat32, "float32");
  check_array("decay_bias", decay_bias, {num_decays}, ElementType::kFloat32, "float32");
  if (skip) check_array("skip", *skip, {num_heads}, ElementType::kFloat32, "float32");
  check_dims("norm", norm, 1);
  const bool has_norm_of_each = norm.size(0) != value_dim;
  check_array("norm", norm, {has_norm_of_each ? value_size : value_dim}, ElementType::kFloat32, "float32");
  check_array("outputs", outputs, {num_tokens, value_size}, ElementType::kFloat32, "float32");
  check_array("out", out, {num_tokens, value_size}, gates.type, "gates'");

  LinearAttention step{};
  step.type = gates.type;
  step.mixed = numbers<float>(mixed);
  step.gates = gates.data;
  step.gate_stride = check_rows("gates", gates, gates, value_size);
  step.decays = decays.data;
  step.decay_stride = check_rows("decays", decays, gates, num_decays);
  step.rates = rates ? rates->data : nullptr;
  step.rate_stride = rates ? check_rows("rates", *rates, gates, num_heads) : 0;
  step.log_decay = numbers<float>(log_decay);
  step.decay_bias = numbers<float>(decay_bias);
  step.skip = skip ? numbers<float>(*skip) : nullptr;
  step.norm = numbers<float>(norm);
  step.states = static_cast<float*>(states.data);
  step.outputs = static_cast<float*>(outputs.data);
  step.out = out.data;
  step.num_heads = num_heads;
  step.num_key_heads = num_key_heads;
  step.key_dim = key_dim;
  step.value_dim = value_dim;
  step.norm_heads = norm_heads;
  step.norm_epsilon = static_cast<float>(norm_epsilon);
  step.decay_floor = static_cast<float>(decay_floor);
  step.has_channel_decays = has_channel_decays;
  step.has_norm_of_each = has_norm_of_each;
  step.gates_with_sigmoid = gates_with_sigmoid;
  step.gates_before_norm = gates_before_norm;
  step.chunks = read_chunks(row_starts, load, store, save, num_before_save);
  run_kernel([step] { linear_attention(step); });
}

void attend_with_constant_decays(const Tensor& mixed, const Tensor& log_decay, const Tensor& states,
                                 const Tensor& row_starts, const Tensor& load, const Tensor& store, const Tensor& save,
                                 const Tensor& num_before_save, const Tensor& outputs, const Tensor& out) {
  check_dims("states", states, 4);
  const int64_t num_heads = states.size(1), key_dim = states.size(2), value_dim = states.size(3);
  check_array("states", states, {states.size(0), num_heads, key_dim, value_dim}, ElementType::kFloat32, "float32");
  if (key_dim > kMaxLinearHead || value_dim > kMaxLinearHead) {
    refuse("states of shape " + shape_text(states) + ", but heads have at most " + std::to_string(kMaxLinearHead) +
           " values");
  }
  check_dims("mixed", mixed, 2);
  const int64_t num_tokens = mixed.size(0), value_size = num_heads * value_dim;
  check_array("mixed", mixed, {num_tokens, 2 * num_heads * key_dim + value_size}, ElementType::kFloat32, "float32");
  check_array("log_decay", log_decay, {num_heads}, ElementType::kFloat32, "float32");
  check_array("outputs", outputs, {num_tokens, value_size}, ElementType::kFloat32, "float32");
  check_float_type("out", out);
  check_array("out", out, {num_tokens, value_size}, out.type, "its own");

  LinearAttention step{};
  step.type = out.type;
  step.mixed = numbers<float>(mixed);
  step.log_decay = numbers<float>(log_decay);
  step.states = static_cast<float*>(states.data);
  step.outputs = static_cast<float*>(outputs.data);
  step.out = out.data;
  step.num_heads = step.num_key_heads = num_heads;
  step.key_dim = key_dim;
  step.value_dim = value_dim;
  step.norm_heads = 1;
  step.chunks = read_chunks(row_starts, load, store, save, num_before_save);
  run_kernel([step] { linear_attention(step); });
}

void scan_rows(const Tensor& values, const Tensor& steps, const Tensor& inputs, const Tensor& outputs,
               const Tensor& gates, const Tensor& log_decay, const Tensor& skip, const Tensor& states,
               const Tensor& row_starts, const Tensor& load, const Tensor& store, const Tensor& save,
               const Tensor& num_before_save, const Tensor& out) {
  check_dims("states", states, 3);
  const int64_t num_channels = states.size(1), state_size = states.size(2);
  check_array("states", states, {states.size(0), num_channels, state_size}, ElementType::kFloat32, "float32");
  if (state_size > kMaxSelectiveState) {
    refuse("states of shape " + shape_text(states) + ", but a channel has at most " +
           std::to_string(kMaxSelectiveState) + " values");
  }
  check_dims("gates", gates, 2);
  check_float_type("gates", gates);
  const int64_t num_tokens = gates.size(0);
  check_array("values", values, {num_tokens, num_channels}, ElementType::kFloat32, "float32");
  check_array("steps", steps, {num_tokens, num_channels}, ElementType::kFloat32, "float32");
  check_type("inputs", inputs, ElementType::kFloat32, "float32");
  check_array("log_decay", log_decay, {num_channels, state_size}, ElementType::kFloat32, "float32");
  check_array("skip", skip, {num_channels}, ElementType::kFloat32, "float32");
  check_array("out", out, {num_tokens, num_channels}, gates.type, "gates'");

  SelectiveScan scan{};
  scan.type = gates.type;
  scan.values = numbers<float>(values);
  scan.steps = numbers<float>(steps);
  scan.inputs = numbers<float>(inputs);
  scan.outputs = numbers<float>(outputs);
  scan.input_stride = check_rows("inputs", inputs, inputs, state_size);
  scan.output_stride = check_rows("outputs", outputs, inputs, state_size);
  scan.gates = gates.data;
  scan.gate_stride = check_rows("gates", gates, gates, num_channels);
  scan.log_decay = numbers<float>(log_decay);
  scan.skip = numbers<float>(skip);
  scan.states = static_cast<float*>(states.data);
  scan.out = out.data;
  scan.num_channels = num_channels;
  scan.state_size = state_size;
  scan.chunks = read_chunks(row_starts, load, store, save, num_before_save);
  run_kernel([scan] { selective_scan(scan); });
}

}  // namespace

void bind_recurrent(nb::module_& module) {
  using namespace nb::literals;
  module.def("short_convolution", &convolve_rows, "input"_a, "taps"_a, "bias"_a.none(), "states"_a, "row_starts"_a,
             "load"_a, "store"_a, "save"_a, "num_before_save"_a, "out"_a, nb::kw_only(), "is_gated"_a, "is_linear"_a,
             "scale"_a.none() = nb::none(), "token_taps"_a.none() = nb::none(),
             "Write a causal convolution of each channel, perhaps times `scale`, its SiLU, or a gated convolution of "
             "gated inputs.");
  module.def("linear_attention", &attend, "mixed"_a, "gates"_a, "decays"_a, "rates"_a.none(), "log_decay"_a,
             "decay_bias"_a, "skip"_a.none(), "norm"_a, "states"_a, "row_starts"_a, "load"_a, "store"_a, "save"_a,
             "num_before_save"_a, "outputs"_a, "out"_a, nb::kw_only(), "norm_heads"_a, "norm_epsilon"_a,
             "decay_floor"_a, "gates_with_sigmoid"_a, "gates_before_norm"_a,
             "Update states by the delta rule, or without it if there are no rates, and write the gated outputs.");
  module.def("lightning_attention", &attend_with_constant_decays, "mixed"_a, "log_decay"_a, "states"_a, "row_starts"_a,
             "load"_a, "store"_a, "save"_a, "num_before_save"_a, "outputs"_a, "out"_a,
             "Update states with a constant decay of each head, and write the outputs.");
  module.def("selective_scan", &scan_rows, "values"_a, "steps"_a, "inputs"_a, "outputs"_a, "gates"_a, "log_decay"_a,
             "skip"_a, "states"_a, "row_starts"_a, "load"_a, "store"_a, "save"_a, "num_before_save"_a, "out"_a,
             "Update states by a selective scan, and write the gated outputs.");
}

}  // namespace moeserve
