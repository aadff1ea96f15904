// Bindings of packed weights and their products.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sys/mman.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "bindings.h"
#include "cpu/packed_weight.h"
#include "packed_weights.h"

namespace nb = nanobind;

namespace moeserve {

namespace {

WeightFormat format_of_name(const std::string& name) {
  std::string names;
  for (int i = 0; i < kNumFormats; ++i) {
    if (name == kFormats[i].name) return static_cast<WeightFormat>(i);
    names += (i == 0 ? "" : (i == kNumFormats - 1 ? " or " : ", ")) + std::string(kFormats[i].name);
  }
  refuse("'" + name + "' is no format of packed weights; expected " + names);
}

// Return the names of the formats that are packed from stored codes.
std::vector<std::string> stored_formats() {
  std::vector<std::string> names;
  for (const FormatTraits& traits : kFormats) {
    if (traits.is_stored()) names.emplace_back(traits.name);
  }
  return names;
}

Activation activation_of_name(const std::string& name) {
  if (name == "none") return Activation::kNone;
  if (name == "swiglu") return Activation::kSwiGLU;
  if (name == "clamped_swiglu") return Activation::kClampedSwiGLU;
  if (name == "limited_swiglu") return Activation::kLimitedSwiGLU;
  if (name == "cut_swiglu") return Activation::kCutSwiGLU;
  if (name == "squared_relu") return Activation::kSquaredReLU;
  if (name == "geglu") return Activation::kGeGLU;
  if (name == "capped_swiglu") return Activation::kCappedSwiGLU;
  refuse(
      "'" + name +
      "' is no activation; expected none, swiglu, clamped_swiglu, limited_swiglu, cut_swiglu, squared_relu, geglu or "
      "capped_swiglu");
}

InputChunks chunks_of(int64_t num_inputs, std::optional<int64_t> chunk_inputs) {
  const InputChunks chunks{num_inputs, chunk_inputs.value_or(num_inputs)};
  if (chunks.chunk_inputs < 1 || chunks.count() > kMaxInputChunks) {
    refuse("chunk_inputs=" + std::to_string(chunks.chunk_inputs) + " does not divide " + std::to_string(num_inputs) +
           " inputs into at most " + std::to_string(kMaxInputChunks) + " chunks");
  }
  return chunks;
}

// Return the bytes of a packed weight of `num_parts` parts, each of which begins with its own panel.
int64_t packed_bytes(const std::string& format, int64_t num_outputs, int64_t num_inputs, int64_t num_parts,
                     std::optional<int64_t> chunk_inputs) {
  const WeightFormat known = format_of_name(format);
  if (num_outputs < 1 || num_inputs < 1 || num_parts < 1 || num_outputs % num_parts != 0) {
    refuse("a weight of shape [" + std::to_string(num_outputs) + ", " + std::to_string(num_inputs) +
           "] cannot be packed in " + std::to_string(num_parts) + " parts");
  }
  const InputChunks chunks = chunks_of(num_inputs, chunk_inputs);
  return num_parts * count_panels(num_outputs / num_parts) * panel_bytes(known, chunks);
}

void pack(const std::string& format, const Tensor& weight, const Tensor& panels, int64_t num_parts,
          std::optional<int64_t> chunk_inputs, const std::optional<Tensor>& int4_scales) {
  check_dims("weight", weight, 2);
  check_float_type("weight", weight);
  check_contiguous("weight", weight);
  check_type("panels", panels, ElementType::kUInt8, "uint8");
  check_contiguous("panels", panels);
  const int64_t bytes = packed_bytes(format, weight.size(0), weight.size(1), num_parts, chunk_inputs);
  const InputChunks chunks = chunks_of(weight.size(1), chunk_inputs);
  check_shape("panels", panels, {bytes});
  const WeightFormat known = format_of_name(format);
  const bool keeps_type = !is_quantized(known);
  if (traits_of(known).is_stored() && !can_quantize(known)) {
    refuse("weights are packed as " + format + " from codes: see pack_stored");
  }
  if (keeps_type && (known == WeightFormat::kFloat32) != (weight.type == ElementType::kFloat32)) {
    refuse("weight is not of type " + format);
  }
  if (weight.data == panels.data && (!keeps_type || bytes != weight.num_elements() * element_bytes(weight.type))) {
    refuse("a weight of shape " + shape_text(weight) + " cannot be packed as " + format + " in place");
  }
  if (int4_scales.has_value() != (known == WeightFormat::kInt4)) refuse("int4_scales are for int4, which needs them");
  if (int4_scales) {
    if (chunks.count() > 1 && chunks.chunk_inputs % kInputGroup != 0) {
      refuse("int4_scales need chunks of whole groups of inputs");
    }
    const int64_t num_groups = (weight.size(1) + kInputGroup - 1) / kInputGroup;
    check_array("int4_scales", *int4_scales, {weight.size(0), num_groups}, ElementType::kFloat16, "float16");
  }
  const int64_t rows = weight.size(0) / num_parts;
  const int64_t source_bytes = rows * weight.size(1) * element_bytes(weight.type);
  const nb::gil_scoped_release released;
  for (int64_t part = 0; part < num_parts; ++part) {
    const uint16_t* scales = nullptr;
    if (int4_scales) scales = numbers<uint16_t>(*int4_scales) + part * rows * int4_scales->size(1);
    pack_weight(known, weight.type, static_cast<const char*>(weight.data) + part * source_bytes, scales, rows, chunks,
                static_cast<char*>(panels.data) + part * (bytes / num_parts));
  }
}

// Pack a weight of `num_inputs` from the codes [outputs, bytes] of a checkpoint, without the first `first_input` inputs
// of their first block. `scales` [outputs, units of inputs] are needed if they are stored beside the codes. Return
// false if a scale is not finite.
bool pack_stored(const std::string& format, const Tensor& codes, const Tensor& panels, int64_t num_inputs,
                 int64_t num_parts, std::optional<int64_t> chunk_inputs, const std::optional<Tensor>& scales,
                 int64_t first_input) {
  check_dims("codes", codes, 2);
  check_type("codes", codes, ElementType::kUInt8, "uint8");
  check_contiguous("codes", codes, 1);
  const WeightFormat known = format_of_name(format);
  const FormatTraits& traits = traits_of(known);
  const InputChunks chunks = chunks_of(num_inputs, chunk_inputs);
  if (num_inputs % kInputGroup != 0 || chunks.chunk_inputs % kInputGroup != 0) {
    refuse("weights in " + format + " have whole groups of 32 inputs, not " + std::to_string(num_inputs) +
           " inputs in chunks of " + std::to_string(chunks.chunk_inputs));
  }
  const int64_t bytes = packed_bytes(format, codes.size(0), num_inputs, num_parts, chunk_inputs);
  check_array("panels", panels, {bytes}, ElementType::kUInt8, "uint8");
  const int64_t unit = panel_unit(known, chunks.chunk_inputs).inputs;
  if (!traits.is_stored() || num_inputs % unit != 0 || first_input < 0 || first_input % unit != 0 ||
      codes.size(1) != stored_row_bytes(known, first_input + num_inputs)) {
    refuse("codes of shape " + shape_text(codes) + " from input " + std::to_string(first_input) + " on are not " +
           std::to_string(num_inputs) + " inputs in " + format);
  }
  const bool needs_scales = traits.scale_type != ElementType::kOther;
  if (needs_scales != scales.has_value()) refuse(format + (needs_scales ? " needs scales" : " takes no scales"));
  const int64_t num_scales = padded_inputs(known, chunks) / unit;
  if (needs_scales) check_array("scales", *scales, {codes.size(0), num_scales}, traits.scale_type, "the format's");
  const int64_t rows = codes.size(0) / num_parts;
  const int64_t scale_bytes = needs_scales ? rows * num_scales * element_bytes(traits.scale_type) : 0;
  const nb::gil_scoped_release released;
  bool is_finite = true;
  for (int64_t part = 0; part < num_parts; ++part) {
    const char* own_scales = needs_scales ? static_cast<const char*>(scales->data) + part * scale_bytes : nullptr;
    const StoredRows stored{numbers<uint8_t>(codes) + part * rows * codes.strides[0], codes.strides[0], rows,
                            first_input, own_scales};
    char* target = static_cast<char*>(panels.data) + part * (bytes / num_parts);
    is_finite &= traits.pack_stored(known, stored, chunks, target);
  }
  return is_finite;
}

// Quantise a weight [outputs, inputs] to rows of blocks [outputs, bytes], with importances [inputs].
void quantize(const std::string& format, const Tensor& weight, const Tensor& rows,
              const std::optional<Tensor>& importances) {
  check_dims("weight", weight, 2);
  check_float_type("weight", weight);
  check_contiguous("weight", weight);
  const WeightFormat known = format_of_name(format);
  if (!can_quantize(known)) refuse("weights are quantised to q4_k, q5_k or q6_k, not to " + format);
  check_array("rows", rows, {weight.size(0), stored_row_bytes(known, weight.size(1))}, ElementType::kUInt8, "uint8");
  if (importances) check_array("importances", *importances, {weight.size(1)}, ElementType::kFloat32, "float32");
  const nb::gil_scoped_release released;
  quantize_gguf(known, weight.type, weight.data, importances ? numbers<float>(*importances) : nullptr, weight.size(0),
                weight.size(1), static_cast<uint8_t*>(rows.data));
}

// Request huge pages for memory that has not been used yet: they are faster to allocate and to address.
void advise_large_pages(const Tensor& memory) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kLargePage = uintptr_t{1} << 21;
  const auto address = reinterpret_cast<uintptr_t>(memory.data);
  const uintptr_t begin = (address + kLargePage - 1) / kLargePage * kLargePage;
  const uintptr_t end = (address + memory.num_elements() * element_bytes(memory.type)) / kLargePage * kLargePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // best effort
#endif
}

}  // namespace

PackedWeights::PackedWeights(const std::string& format, nb::object panels, int64_t num_outputs, int64_t num_inputs,
                             nb::object bias, const std::string& activation, double alpha, double limit,
                             std::optional<int64_t> chunk_inputs)
    : panels_owner_(std::move(panels)), bias_owner_(std::move(bias)) {
  product_.format = format_of_name(format);
  product_.activation = activation_of_name(activation);
  product_.alpha = static_cast<float>(alpha);
  product_.limit = static_cast<float>(limit);
  product_.num_outputs = num_outputs;
  product_.num_inputs = num_inputs;
  product_.chunk_inputs = chunks_of(num_inputs, chunk_inputs).chunk_inputs;
  panels_ = nb::cast<Tensor>(panels_owner_);
  check_type("panels", panels_, ElementType::kUInt8, "uint8");
  check_dims("panels", panels_, 2);
  check_contiguous("panels", panels_);
  const int64_t num_parts = is_gated(product_.activation) ? 2 : 1;
  const int64_t bytes = packed_bytes(format, num_outputs, num_inputs, num_parts, product_.chunk_inputs);
  check_shape("panels", panels_, {panels_.size(0), bytes});
  num_columns_ = num_outputs / num_parts;
  if (bias_owner_.is_none()) return;
  bias_ = nb::cast<Tensor>(bias_owner_);
  check_float_type("bias", *bias_);
  check_shape("bias", *bias_, {num_weights(), num_outputs});
  check_contiguous("bias", *bias_);
}

void PackedWeights::multiply_rows(const Tensor& input, const Tensor& counts, bool has_spare_rows, const Tensor& output,
                                  const std::optional<Tensor>& indices, int64_t divisor) const {
  check_dims("input", input, 2);
  check_shape("input", input, {input.size(0), product_.num_inputs});
  const int64_t num_rows = indices ? indices->size(0) : input.size(0);
  check_shape("output", output, {num_rows, num_columns_});
  if (indices) {
    check_array("indices", *indices, {num_rows}, ElementType::kInt64, "int64");
    if (divisor < 1) refuse("divisor=" + std::to_string(divisor) + ", but it must be at least 1");
  }
  check_array("counts", counts, {num_weights()}, ElementType::kInt64, "int64");
  const PackedProduct product = product_of(input, output);
  run([this, product, input, counts, has_spare_rows, output, indices, divisor] {
    check_counts(counts, num_weights(), output.size(0), has_spare_rows);
    const std::vector<RowGroup> groups = groups_of_rows(input, counts, output, !indices);
    if (!indices) return packed_product(product, groups);
    const auto* rows = numbers<int64_t>(*indices);
    check_indices(rows, count_rows(groups), divisor, input.size(0));
    const GatheredRows gathered{static_cast<const char*>(input.data), input.size(0), rows, divisor};
    packed_product(product, groups, &gathered);
  });
}

void PackedWeights::multiply(const Tensor& input, const Tensor& output) const {
  check_dims("input", input, 2);
  check_shape("input", input, {input.size(0), product_.num_inputs});
  check_shape("output", output, {input.size(0), num_columns_});
  if (num_weights() != 1) refuse("there are " + std::to_string(num_weights()) + " weights, not one");
  const PackedProduct product = product_of(input, output);
  const std::vector<RowGroup> groups{group_of(0, row_of(input, 0), row_of(output, 0), input.size(0))};
  run([product, groups] { packed_product(product, groups); });
}

void PackedWeights::multiply_each(const Tensor& input, const Tensor& output) const {
  check_dims("input", input, 3);
  check_shape("input", input, {input.size(0), num_weights(), product_.num_inputs});
  check_shape("output", output, {input.size(0), num_weights(), num_columns_});
  const PackedProduct product = product_of(input, output);
  std::vector<RowGroup> groups;
  for (int64_t weight = 0; weight < num_weights(); ++weight) {
    groups.push_back(group_of(
        weight, static_cast<char*>(input.data) + weight * input.strides[1] * element_bytes(input.type),
        static_cast<char*>(output.data) + weight * output.strides[1] * element_bytes(input.type), input.size(0)));
  }
  run([product, groups] { packed_product(product, groups); });
}

PackedProduct PackedWeights::product_of(const Tensor& input, const Tensor& output) const {
  check_float_type("input", input);
  check_contiguous("input", input, input.num_dims - 1);
  check_contiguous("output", output, output.num_dims - 1);
  if (bias_) check_type("input", input, bias_->type, "bias'");
  const RowForm form = traits_of(product_.format).rows;
  if (form == RowForm::kBFloat16) check_type("input", input, ElementType::kBFloat16, "bfloat16");
  if (form == RowForm::kFloat32) check_type("input", input, ElementType::kFloat32, "float32");
  PackedProduct product = product_;
  product.type = input.type;
  product.output_type = output.type;
  if (output.type != ElementType::kFloat32 || product.activation != Activation::kNone) {
    check_type("output", output, input.type, "input's");
  }
  product.input_stride = input.strides[0];
  product.output_stride = output.strides[0];
  return product;
}

RowGroup PackedWeights::group_of(int64_t weight, const char* input, char* output, int64_t num_rows) const {
  return group_of(weight, static_cast<const char*>(panels_.data) + weight * panels_.size(1), input, output, num_rows);
}

RowGroup PackedWeights::group_of(int64_t weight, const char* panels, const char* input, char* output,
                                 int64_t num_rows) const {
  const void* bias = nullptr;
  if (bias_) {
    bias = static_cast<const char*>(bias_->data) + weight * product_.num_outputs * element_bytes(bias_->type);
  }
  return {panels, bias, input, output, num_rows};
}

std::vector<RowGroup> PackedWeights::groups_of_rows(const Tensor& input, const Tensor& counts, const Tensor& output,
                                                    bool has_rows) const {
  std::vector<RowGroup> groups;
  int64_t first_row = 0;
  for (int64_t weight = 0; weight < num_weights(); ++weight) {
    const int64_t num_rows = numbers<int64_t>(counts)[weight];
    if (num_rows == 0) continue;
    const char* own = has_rows ? row_of(input, first_row) : nullptr;
    groups.push_back(group_of(weight, own, row_of(output, first_row), num_rows));
    first_row += num_rows;
  }
  return groups;
}

void check_counts(const Tensor& counts, int64_t num_weights, int64_t num_rows, bool has_spare_rows) {
  int64_t total = 0;
  for (int64_t weight = 0; weight < num_weights; ++weight) {
    const int64_t count = numbers<int64_t>(counts)[weight];
    if (count < 0 || count > num_rows - total) {
      refuse("counts do not fit the " + std::to_string(num_rows) + " rows of input");
    }
    total += count;
  }
  if (total < num_rows && !has_spare_rows) {
    refuse("counts add up to " + std::to_string(total) + ", but input has " + std::to_string(num_rows) + " rows");
  }
}

void check_indices(const int64_t* indices, int64_t num_rows, int64_t divisor, int64_t num_sources) {
  for (int64_t r = 0; r < num_rows; ++r) {
    if (indices[r] < 0 || indices[r] / divisor >= num_sources) refuse("indices are out of range");
  }
}

void bind_products(nb::module_& module) {
  using namespace nb::literals;
  module.def("packed_bytes", &packed_bytes, "format"_a, "num_outputs"_a, "num_inputs"_a, "num_parts"_a = 1,
             "chunk_inputs"_a.none() = nb::none(), "Return the bytes of a packed weight [num_outputs, num_inputs].");
  module.def("pack_weight", &pack, "format"_a, "weight"_a, "panels"_a, "num_parts"_a = 1,
             "chunk_inputs"_a.none() = nb::none(), "int4_scales"_a.none() = nb::none(),
             "Pack a weight [outputs, inputs] into `panels`, which may be the memory of the weight.");
  module.def("pack_stored", &pack_stored, "format"_a, "codes"_a, "panels"_a, "num_inputs"_a, "num_parts"_a = 1,
             "chunk_inputs"_a.none() = nb::none(), "scales"_a.none() = nb::none(), "first_input"_a = 0,
             "Pack a weight from the codes of a checkpoint into `panels`. Return False if a scale is not finite.");
  module.def("quantize_gguf", &quantize, "format"_a, "weight"_a, "rows"_a, "importances"_a.none() = nb::none(),
             "Quantise a weight [outputs, inputs] to rows of blocks of Q4_K, Q5_K or Q6_K [outputs, bytes].");
  module.def("stored_formats", &stored_formats, "Return the names of the formats that are packed from stored codes.");
  module.def("advise_large_pages", &advise_large_pages, "memory"_a,
             "Request huge pages for memory that has not been used yet.");
  nb::class_<PackedWeights>(module, "PackedWeights", "Packed weights of one shape, with bias and activation.")
      .def(nb::init<const std::string&, nb::object, int64_t, int64_t, nb::object, const std::string&, double, double,
                    std::optional<int64_t>>(),
           "format"_a, "panels"_a, "num_outputs"_a, "num_inputs"_a, "bias"_a.none() = nb::none(),
           "activation"_a = "none", "alpha"_a = 0.0, "limit"_a = 0.0, "chunk_inputs"_a.none() = nb::none())
      .def("multiply", &PackedWeights::multiply, "input"_a, "output"_a, "Multiply all rows with the only weight.")
      .def("multiply_rows", &PackedWeights::multiply_rows, "input"_a, "counts"_a, "has_spare_rows"_a, "output"_a,
           "indices"_a.none() = nb::none(), "divisor"_a = 1,
           "Multiply the first counts[0] rows with the first weight, and so on. With indices [R], the rows are "
           "input[indices // divisor].")
      .def("multiply_each", &PackedWeights::multiply_each, "input"_a, "output"_a, "Multiply input[:, i] with weight i.")
      .def_prop_ro("num_weights", &PackedWeights::num_weights)
      .def_prop_ro("num_bytes", &PackedWeights::num_bytes);
}

}  // namespace moeserve
