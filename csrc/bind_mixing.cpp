// Bindings of weighted sums of rows, GELU, the mixing of heads, limits of lengths, and attention to sums.

#include <nanobind/stl/optional.h>

#include <optional>

#include "arguments.h"
#include "bindings.h"
#include "cpu/mixing.h"
#include "cpu_graph.h"

namespace nb = nanobind;

namespace moeserve {

namespace {

const float* read_vector(const char* name, const std::optional<Tensor>& vector, int64_t width) {
  if (!vector) return nullptr;
  check_array(name, *vector, {width}, ElementType::kFloat32, "float32");
  return numbers<float>(*vector);
}

void sum_weighted(const Tensor& a, const std::optional<Tensor>& a_scale, const std::optional<Tensor>& a_bias,
                  const std::optional<Tensor>& b, const std::optional<Tensor>& b_scale,
                  const std::optional<Tensor>& b_bias, const Tensor& out) {
  check_dims("a", a, 2);
  check_float_type("a", a);
  check_contiguous("a", a);
  const int64_t num_rows = a.size(0), width = a.size(1);
  if (b) check_array("b", *b, {num_rows, width}, a.type, "a's");
  check_array("out", out, {num_rows, width}, a.type, "a's");

  RowSum sum{};
  sum.type = a.type;
  sum.a = a.data;
  sum.b = b ? b->data : nullptr;
  sum.a_scale = read_vector("a_scale", a_scale, width);
  sum.a_bias = read_vector("a_bias", a_bias, width);
  sum.b_scale = read_vector("b_scale", b_scale, width);
  sum.b_bias = read_vector("b_bias", b_bias, width);
  sum.out = out.data;
  sum.num_rows = num_rows;
  sum.width = width;
  run_kernel([sum] { add_weighted(sum); });
}

void apply_gelu(const Tensor& x, const Tensor& out) {
  check_dims("x", x, 2);
  check_float_type("x", x);
  check_contiguous("x", x);
  check_array("out", out, {x.size(0), x.size(1)}, x.type, "x's");
  const Gelu step{x.type, x.data, out.data, x.num_elements()};
  run_kernel([step] { gelu(step); });
}

void mix(const Tensor& projected, const Tensor& convolved, const Tensor& temperatures, const Tensor& out) {
  check_dims("convolved", convolved, 3);
  check_float_type("convolved", convolved);
  check_contiguous("convolved", convolved);
  check_dims("temperatures", temperatures, 1);
  const int64_t num_tokens = convolved.size(0), num_all = convolved.size(1), size = convolved.size(2);
  const int64_t num_key_heads = temperatures.size(0), num_heads = num_all - num_key_heads;
  if (num_key_heads < 1 || num_heads < 1 || num_heads % num_key_heads != 0 || size > kMaxMixedHead) {
    refuse("convolved of shape " + shape_text(convolved) + " does not fit temperatures of shape " +
           shape_text(temperatures));
  }
  check_dims("projected", projected, 2);
  check_shape("projected", projected, {num_tokens, num_all * size});
  check_type("projected", projected, convolved.type, "convolved's");
  check_contiguous("projected", projected, 1);
  check_array("temperatures", temperatures, {num_key_heads}, ElementType::kFloat32, "float32");
  check_array("out", out, {num_tokens, num_all, size}, convolved.type, "convolved's");

  HeadMixing step{};
  step.type = convolved.type;
  step.projected = projected.data;
  step.row_stride = projected.strides[0];
  step.convolved = convolved.data;
  step.temperatures = numbers<float>(temperatures);
  step.out = out.data;
  step.num_tokens = num_tokens;
  step.num_heads = num_heads;
  step.num_key_heads = num_key_heads;
  step.head_size = size;
  run_kernel([step] { mix_heads(step); });
}

void limit(const Tensor& x, const std::optional<Tensor>& scale, double length, const Tensor& out) {
  check_dims("x", x, 3);
  check_float_type("x", x);
  check_contiguous("x", x, 1);
  const int64_t num_heads = x.size(1), size = x.size(2);
  if (scale) check_array("scale", *scale, {num_heads, size}, ElementType::kFloat32, "float32");
  check_array("out", out, {x.size(0), num_heads, size}, x.type, "x's");

  LengthLimit step{};
  step.type = x.type;
  step.x = x.data;
  step.token_stride = x.strides[0];
  step.scale = scale ? numbers<float>(*scale) : nullptr;
  step.out = out.data;
  step.limit = static_cast<float>(length);
  step.num_tokens = x.size(0);
  step.num_heads = num_heads;
  step.head_size = size;
  run_kernel([step] { limit_lengths(step); });
}

void attend(const Tensor& sums, const std::optional<Tensor>& update, const std::optional<Tensor>& queries,
            const std::optional<Tensor>& out, int64_t num_sums, bool begins) {
  check_dims("sums", sums, 3);
  check_float_type("sums", sums);
  check_contiguous("sums", sums, 1);
  const int64_t num_tokens = sums.size(0), width = sums.size(2);
  if (num_sums < 1 || num_sums > sums.size(1) || num_sums > kMaxSums) {
    refuse("num_sums=" + std::to_string(num_sums) + " does not fit sums of shape " + shape_text(sums) +
           ", of which at most " + std::to_string(kMaxSums) + " are read");
  }
  if (update) check_array("update", *update, {num_tokens, width}, sums.type, "sums'");
  if (queries.has_value() != out.has_value()) refuse("queries and out go together: one of them is None");

  SumAttention step{};
  if (queries) {
    check_dims("queries", *queries, 2);
    step.num_queries = queries->size(0);
    if (step.num_queries > kMaxSumQueries) refuse("queries of shape " + shape_text(*queries) + " are too many");
    check_array("queries", *queries, {step.num_queries, width}, ElementType::kFloat32, "float32");
    check_array("out", *out, {num_tokens, step.num_queries, width}, sums.type, "sums'");
    step.queries = numbers<float>(*queries);
    step.out = out->data;
  }
  step.type = sums.type;
  step.sums = sums.data;
  step.token_stride = sums.strides[0];
  step.update = update ? update->data : nullptr;
  step.num_tokens = num_tokens;
  step.num_sums = num_sums;
  step.width = width;
  step.begins = begins;
  run_kernel([step] { attend_sums(step); });
}

}  // namespace

void bind_mixing(nb::module_& module) {
  using namespace nb::literals;
  module.def("add_weighted", &sum_weighted, "a"_a, "a_scale"_a.none(), "a_bias"_a.none(), "b"_a.none(),
             "b_scale"_a.none(), "b_bias"_a.none(), "out"_a, "Write (a + a_bias) * a_scale + (b + b_bias) * b_scale.");
  module.def("gelu", &apply_gelu, "x"_a, "out"_a, "Write the GELU of each element.");
  module.def("mix_heads", &mix, "projected"_a, "convolved"_a, "temperatures"_a, "out"_a,
             "Write normalised sums of projected and convolved heads.");
  module.def("limit_lengths", &limit, "x"_a, "scale"_a.none(), "limit"_a, "out"_a,
             "Write heads, perhaps times `scale`, that are scaled down to a length.");
  module.def("attend_sums", &attend, "sums"_a, "update"_a.none(), "queries"_a.none(), "out"_a.none(), nb::kw_only(),
             "num_sums"_a, "begins"_a, "Update the last sum of each token, and write the attention to all of them.");
}

}  // namespace moeserve
