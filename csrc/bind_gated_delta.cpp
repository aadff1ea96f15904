// Bindings of the kernels of gated delta networks.

#include "arguments.h"
#include "bindings.h"
#include "cpu/gated_delta.h"
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

void convolve_rows(const Tensor& input, const Tensor& taps, const Tensor& states, const Tensor& row_starts,
                   const Tensor& load, const Tensor& store, const Tensor& save, const Tensor& num_before_save,
                   const Tensor& out) {
  check_dims("input", input, 2);
  check_float_type("input", input);
  check_contiguous("input", input, 1);
  check_dims("taps", taps, 2);
  const int64_t num_taps = taps.size(0), num_channels = input.size(1);
  if (num_taps < 2 || num_taps > kMaxTaps) {
    refuse("taps of shape " + shape_text(taps) + ", but there must be 2 to " + std::to_string(kMaxTaps) + " taps");
  }
  check_array("taps", taps, {num_taps, num_channels}, ElementType::kFloat32, "float32");
  check_dims("states", states, 3);
  check_array("states", states, {states.size(0), num_taps - 1, num_channels}, input.type, "input's");
  check_array("out", out, {input.size(0), num_channels}, ElementType::kFloat32, "float32");

  ShortConvolution step{};
  step.type = input.type;
  step.input = input.data;
  step.row_stride = input.strides[0];
  step.taps = numbers<float>(taps);
  step.states = states.data;
  step.out = static_cast<float*>(out.data);
  step.num_channels = num_channels;
  step.num_taps = static_cast<int>(num_taps);
  step.chunks = read_chunks(row_starts, load, store, save, num_before_save);
  run_kernel([step] { convolve(step); });
}

void mix(const Tensor& mixed, const Tensor& gates, const Tensor& rates, const Tensor& log_decay,
         const Tensor& decay_bias, const Tensor& norm, const Tensor& states, const Tensor& row_starts,
         const Tensor& load, const Tensor& store, const Tensor& save, const Tensor& num_before_save, const Tensor& out,
         double norm_epsilon) {
  check_dims("states", states, 4);
  const int64_t num_heads = states.size(1), key_dim = states.size(2), value_dim = states.size(3);
  check_array("states", states, {states.size(0), num_heads, key_dim, value_dim}, ElementType::kFloat32, "float32");
  if (key_dim > kMaxDeltaHead || value_dim > kMaxDeltaHead) {
    refuse("states of shape " + shape_text(states) + ", but heads have at most " + std::to_string(kMaxDeltaHead) +
           " values");
  }
  check_dims("gates", gates, 2);
  check_float_type("gates", gates);
  check_contiguous("gates", gates, 1);
  const int64_t num_tokens = gates.size(0), value_size = num_heads * value_dim;
  check_shape("gates", gates, {num_tokens, value_size});
  check_dims("mixed", mixed, 2);
  const int64_t width = mixed.size(1), num_key_heads = (width - value_size) / (2 * key_dim);
  if (num_key_heads < 1 || width != 2 * num_key_heads * key_dim + value_size || num_heads % num_key_heads != 0) {
    refuse("mixed of shape " + shape_text(mixed) + " does not fit states of shape " + shape_text(states));
  }
  check_array("mixed", mixed, {num_tokens, width}, ElementType::kFloat32, "float32");
  check_array("rates", rates, {num_tokens, 2 * num_heads}, gates.type, "gates'");
  check_array("log_decay", log_decay, {num_heads}, ElementType::kFloat32, "float32");
  check_array("decay_bias", decay_bias, {num_heads}, ElementType::kFloat32, "float32");
  check_array("norm", norm, {value_dim}, ElementType::kFloat32, "float32");
  check_array("out", out, {num_tokens, value_size}, gates.type, "gates'");

  GatedDelta step{};
  step.type = gates.type;
  step.mixed = numbers<float>(mixed);
  step.gates = gates.data;
  step.gate_stride = gates.strides[0];
  step.rates = rates.data;
  step.log_decay = numbers<float>(log_decay);
  step.decay_bias = numbers<float>(decay_bias);
  step.norm = numbers<float>(norm);
  step.states = static_cast<float*>(states.data);
  step.out = out.data;
  step.num_heads = num_heads;
  step.num_key_heads = num_key_heads;
  step.key_dim = key_dim;
  step.value_dim = value_dim;
  step.norm_epsilon = static_cast<float>(norm_epsilon);
  step.chunks = read_chunks(row_starts, load, store, save, num_before_save);
  run_kernel([step] { gated_delta(step); });
}

}  // namespace

void bind_gated_delta(nb::module_& module) {
  using namespace nb::literals;
  module.def("convolve", &convolve_rows, "input"_a, "taps"_a, "states"_a, "row_starts"_a, "load"_a, "store"_a, "save"_a,
             "num_before_save"_a, "out"_a, "Write the SiLU of a causal convolution of each channel.");
  module.def("gated_delta", &mix, "mixed"_a, "gates"_a, "rates"_a, "log_decay"_a, "decay_bias"_a, "norm"_a, "states"_a,
             "row_starts"_a, "load"_a, "store"_a, "save"_a, "num_before_save"_a, "out"_a, nb::kw_only(),
             "norm_epsilon"_a, "Update states by the gated delta rule, and write the gated outputs of each token.");
}

}  // namespace moeserve
