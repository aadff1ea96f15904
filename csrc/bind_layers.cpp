// Bindings of element-wise kernels, norms, rotary embedding, routing, pairs and row maxima.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <utility>

#include "arguments.h"
#include "bindings.h"
#include "cpu/draw_tokens.h"
#include "cpu/elementwise.h"
#include "cpu/pairs.h"
#include "cpu/rms_norm.h"
#include "cpu/rotary.h"
#include "cpu/routing.h"
#include "cpu/row_maximum.h"
#include "cpu_graph.h"

namespace nb = nanobind;

namespace moeserve {

namespace {

// Return `tensor`, of shape [tokens, width] or [tokens, heads, width], as rows. It must match `like`.
HeadRows head_rows(const char* name, const Tensor& tensor, const Tensor& like) {
  bool equal = tensor.num_dims == like.num_dims;
  for (int i = 0; equal && i < like.num_dims; ++i) equal = tensor.size(i) == like.size(i);
  if (!equal) refuse(std::string(name) + " has shape " + shape_text(tensor) + ", expected " + shape_text(like));
  check_type(name, tensor, like.type, "x's");
  check_contiguous(name, tensor, like.num_dims - 1);
  return {tensor.data, tensor.strides[0], like.num_dims == 3 ? tensor.strides[1] : 0};
}

RmsNorm read_norm(const Tensor& x, const Tensor& weight, const Tensor& out, double epsilon) {
  if (x.num_dims != 2) check_dims("x", x, 3);
  check_float_type("x", x);
  const int64_t width = x.size(x.num_dims - 1);
  check_array("weight", weight, {width}, x.type, "x's");

  RmsNorm norm{};
  norm.type = x.type;
  norm.x = head_rows("x", x, x);
  norm.weight = weight.data;
  norm.out = head_rows("out", out, x);
  norm.num_tokens = x.size(0);
  norm.num_heads = x.num_dims == 3 ? x.size(1) : 1;
  norm.width = width;
  norm.epsilon = static_cast<float>(epsilon);
  return norm;
}

void norm(const Tensor& x, const Tensor& weight, double epsilon, const Tensor& out) {
  const RmsNorm step = read_norm(x, weight, out, epsilon);
  run_kernel([step] { rms_norm(step); });
}

void add_norm(const Tensor& x, const Tensor& update, const Tensor& weight, double epsilon, const Tensor& sum,
              const Tensor& out) {
  RmsNorm step = read_norm(x, weight, out, epsilon);
  step.update = head_rows("update", update, x);
  step.sum = head_rows("sum", sum, x);
  if (step.num_tokens * step.num_heads * step.width == 0) return;  // empty tensors have no memory
  run_kernel([step] { rms_norm(step); });
}

void rotate(const Tensor& heads, const Tensor& cosines, const Tensor& sines, bool is_interleaved, const Tensor& out) {
  check_dims("heads", heads, 3);
  check_float_type("heads", heads);
  check_contiguous("heads", heads, 2);
  check_shape("out", out, {heads.size(0), heads.size(1), heads.size(2)});
  check_type("out", out, heads.type, "heads'");
  check_contiguous("out", out, 2);
  check_dims("cosines", cosines, 2);
  check_array("cosines", cosines, {heads.size(0), cosines.size(1)}, ElementType::kFloat32, "float32");
  check_array("sines", sines, {heads.size(0), cosines.size(1)}, ElementType::kFloat32, "float32");
  if (2 * cosines.size(1) > heads.size(2)) {
    refuse("heads of shape " + shape_text(heads) + " have less than 2 * " + std::to_string(cosines.size(1)) +
           " elements to rotate");
  }

  RotaryEmbedding step{};
  step.type = heads.type;
  step.source = {heads.data, heads.strides[0], heads.strides[1]};
  step.target = {out.data, out.strides[0], out.strides[1]};
  step.cosines = numbers<float>(cosines);
  step.sines = numbers<float>(sines);
  step.num_tokens = heads.size(0);
  step.num_heads = heads.size(1);
  step.head_size = heads.size(2);
  step.num_pairs = cosines.size(1);
  step.is_interleaved = is_interleaved;
  run_kernel([step] { apply_rope(step); });
}

Scoring scoring_of_name(const std::string& name) {
  if (name == "softmax") return Scoring::kSoftmax;
  if (name == "sigmoid") return Scoring::kSigmoid;
  if (name == "softmax_of_chosen") return Scoring::kSoftmaxOfChosen;
  if (name == "sigmoid_of_chosen") return Scoring::kSigmoidOfChosen;
  if (name == "sqrt_softplus") return Scoring::kSqrtSoftplus;
  if (name == "sparse_mixer") return Scoring::kSparseMixer;
  refuse("scoring='" + name +
         "' is none of softmax, sigmoid, softmax_of_chosen, sigmoid_of_chosen, sqrt_softplus, sparse_mixer");
}

const float* read_per_expert(const char* name, const std::optional<Tensor>& tensor, int64_t num_experts) {
  if (!tensor) return nullptr;
  check_array(name, *tensor, {num_experts}, ElementType::kFloat32, "float32");
  return numbers<float>(*tensor);
}

void choose(const Tensor& hidden, const Tensor& weight, const std::optional<Tensor>& bias,
            const std::optional<Tensor>& correction, const Tensor& experts, const Tensor& weights,
            const std::string& scoring, int64_t num_groups, int64_t num_chosen_groups, int64_t experts_rating_group,
            bool is_normalized, double scale, const std::optional<Tensor>& given, const std::optional<Tensor>& factors,
            double tolerance) {
  check_dims("hidden", hidden, 2);
  check_float_type("hidden", hidden);
  check_contiguous("hidden", hidden, 1);
  const int64_t num_tokens = hidden.size(0);
  check_dims("weight", weight, 2);
  const int64_t num_experts = weight.size(0);
  check_array("weight", weight, {num_experts, hidden.size(1)}, ElementType::kFloat32, "float32");
  check_dims("experts", experts, 2);
  const int64_t top_k = experts.size(1);
  check_array("experts", experts, {num_tokens, top_k}, ElementType::kInt64, "int64");
  check_array("weights", weights, {num_tokens, top_k}, ElementType::kFloat32, "float32");
  if (top_k < 1 || top_k > num_experts) {
    refuse("top_k=" + std::to_string(top_k) + ", but there are " + std::to_string(num_experts) + " experts");
  }
  if (given) check_array("given", *given, {num_tokens, top_k}, ElementType::kInt64, "int64");
  if (num_groups < 1 || num_experts % num_groups != 0) {
    refuse("num_groups=" + std::to_string(num_groups) + " does not divide " + std::to_string(num_experts) + " experts");
  }
  if (num_chosen_groups < 1 || num_chosen_groups > num_groups) {
    refuse("num_chosen_groups=" + std::to_string(num_chosen_groups) + ", but there are " + std::to_string(num_groups));
  }
  const bool is_rated_by_two = experts_rating_group == 2 && num_experts / num_groups >= 2;
  if (experts_rating_group != 1 && !is_rated_by_two) {
    refuse("experts_rating_group=" + std::to_string(experts_rating_group) + ", but it must be 1, or 2 of more experts");
  }

  Routing step{};
  step.type = hidden.type;
  step.hidden = hidden.data;
  step.hidden_stride = hidden.strides[0];
  step.weight = numbers<float>(weight);
  step.bias = read_per_expert("bias", bias, num_experts);
  step.correction = read_per_expert("correction", correction, num_experts);
  step.factors = read_per_expert("factors", factors, num_experts);
  step.given = given ? numbers<int64_t>(*given) : nullptr;
  step.experts = static_cast<int64_t*>(experts.data);
  step.weights = static_cast<float*>(weights.data);
  step.num_tokens = num_tokens;
  step.width = hidden.size(1);
  step.num_experts = num_experts;
  step.top_k = top_k;
  step.scoring = scoring_of_name(scoring);
  step.tolerance = static_cast<float>(tolerance);
  step.num_groups = num_groups;
  step.num_chosen_groups = num_chosen_groups;
  step.experts_rating_group = experts_rating_group;
  step.is_normalized = is_normalized;
  step.scale = static_cast<float>(scale);
  run_kernel([step] { route(step); });
}

void check_indices(const char* name, const Tensor& indices) {
  check_dims(name, indices, 1);
  check_array(name, indices, {indices.size(0)}, ElementType::kInt64, "int64");
}

PairSort read_sort(const Tensor& keys, int64_t first_key, int64_t num_known, const Tensor& order,
                   const Tensor& counts) {
  if (keys.num_dims != 2) check_dims("keys", keys, 1);
  if (keys.type != ElementType::kInt32) check_type("keys", keys, ElementType::kInt64, "int32 or int64");
  check_contiguous("keys", keys, keys.num_dims - 1);
  check_array("order", order, {keys.num_elements()}, ElementType::kInt64, "int64");
  check_indices("counts", counts);
  if (first_key < 0 || counts.size(0) > num_known - first_key) {
    refuse("of " + std::to_string(num_known) + " keys, " + std::to_string(counts.size(0)) + " from " +
           std::to_string(first_key) + " on cannot be counted");
  }

  PairSort step{};
  step.type = keys.type;
  step.keys = keys.data;
  step.keys_per_token = keys.size(keys.num_dims - 1);
  step.token_stride = keys.strides[0];
  step.num_tokens = keys.num_dims == 2 ? keys.size(0) : 1;
  step.first_key = first_key;
  step.num_keys = counts.size(0);
  step.num_known = num_known;
  step.order = static_cast<int64_t*>(order.data);
  step.counts = static_cast<int64_t*>(counts.data);
  return step;
}

int64_t sort(const Tensor& keys, int64_t first_key, int64_t num_known, const Tensor& order, const Tensor& counts) {
  const PairSort step = read_sort(keys, first_key, num_known, order, counts);
  return run_kernel([step] { return sort_pairs(step); }, step.num_tokens * step.keys_per_token);
}

void order_by_key(const Tensor& keys, int64_t first_key, int64_t num_known, const Tensor& order, const Tensor& counts) {
  const PairSort step = read_sort(keys, first_key, num_known, order, counts);
  run_kernel([step] { static_cast<void>(sort_pairs(step)); });
}

void add_to_totals(const Tensor& counts, const Tensor& totals) {
  check_indices("counts", counts);
  check_array("totals", totals, {counts.size(0)}, ElementType::kInt64, "int64");
  const CountAddition step{static_cast<const int64_t*>(counts.data), static_cast<int64_t*>(totals.data),
                           counts.size(0)};
  run_kernel([step] { add_counts(step); });
}

void choose_expert_copies(const Tensor& experts, const Tensor& copies, const Tensor& num_copies, int64_t first_token,
                          const Tensor& chosen) {
  check_dims("experts", experts, 2);
  check_dims("copies", copies, 2);
  check_array("experts", experts, {experts.size(0), experts.size(1)}, ElementType::kInt64, "int64");
  check_array("copies", copies, {copies.size(0), copies.size(1)}, ElementType::kInt64, "int64");
  check_array("num_copies", num_copies, {copies.size(0)}, ElementType::kInt64, "int64");
  check_array("chosen", chosen, {experts.size(0), experts.size(1)}, ElementType::kInt64, "int64");
  if (first_token < 0) refuse("first_token=" + std::to_string(first_token) + ", but tokens count from 0");

  CopyChoice step{};
  step.experts = static_cast<const int64_t*>(experts.data);
  step.copies = static_cast<const int64_t*>(copies.data);
  step.num_copies = static_cast<const int64_t*>(num_copies.data);
  step.chosen = static_cast<int64_t*>(chosen.data);
  step.first_token = first_token;
  step.num_tokens = experts.size(0);
  step.top_k = experts.size(1);
  step.num_experts = copies.size(0);
  step.max_copies = copies.size(1);
  run_kernel([step] { choose_copies(step); });
}

void gather(const Tensor& source, const Tensor& indices, int64_t divisor, const Tensor& out) {
  check_dims("source", source, 2);
  check_contiguous("source", source, 1);
  check_indices("indices", indices);
  check_array("out", out, {indices.size(0), source.size(1)}, source.type, "source's");
  if (divisor < 1) refuse("divisor=" + std::to_string(divisor) + ", but it must be at least 1");

  RowGather step{};
  step.element_bytes = element_bytes(source.type);
  step.source = source.data;
  step.source_stride = source.strides[0];
  step.indices = numbers<int64_t>(indices);
  step.out = out.data;
  step.num_source_rows = source.size(0);
  step.num_rows = indices.size(0);
  step.width = source.size(1);
  step.divisor = divisor;
  run_kernel([step] { gather_rows(step); });
}

void scatter(const Tensor& source, const Tensor& indices, const Tensor& out) {
  check_dims("source", source, 2);
  check_contiguous("source", source);
  check_array("indices", indices, {source.size(0)}, ElementType::kInt64, "int64");
  check_dims("out", out, 2);
  check_array("out", out, {out.size(0), source.size(1)}, source.type, "source's");

  RowScatter step{};
  step.row_bytes = source.size(1) * element_bytes(source.type);
  step.source = source.data;
  step.indices = numbers<int64_t>(indices);
  step.out = out.data;
  step.num_rows = indices.size(0);
  step.num_out_rows = out.size(0);
  run_kernel([step] { scatter_rows(step); });
}

void join(const Tensor& first, const Tensor& second, const Tensor& out) {
  check_dims("first", first, 2);
  check_contiguous("first", first, 1);
  check_dims("second", second, 2);
  check_contiguous("second", second, 1);
  check_shape("second", second, {first.size(0), second.size(1)});
  check_dims("out", out, 2);
  check_contiguous("out", out);

  RowJoin step{};
  step.first = first.data;
  step.second = second.data;
  step.out = out.data;
  step.first_bytes = first.size(1) * element_bytes(first.type);
  step.second_bytes = second.size(1) * element_bytes(second.type);
  step.first_stride = first.strides[0] * element_bytes(first.type);
  step.second_stride = second.strides[0] * element_bytes(second.type);
  step.num_rows = first.size(0);
  const int64_t out_bytes = out.size(1) * element_bytes(out.type);
  if (out.size(0) != step.num_rows || out_bytes != step.first_bytes + step.second_bytes) {
    refuse("out of shape " + shape_text(out) + " does not fit rows of " + std::to_string(step.first_bytes) + " + " +
           std::to_string(step.second_bytes) + " bytes");
  }
  run_kernel([step] { join_rows(step); });
}

void sum_rows(const Tensor& rows, const Tensor& pair_of_row, const Tensor& weights, const Tensor& out) {
  check_dims("rows", rows, 2);
  check_float_type("rows", rows);
  check_contiguous("rows", rows);
  check_array("pair_of_row", pair_of_row, {rows.size(0)}, ElementType::kInt64, "int64");
  check_dims("weights", weights, 2);
  check_array("weights", weights, {weights.size(0), weights.size(1)}, ElementType::kFloat32, "float32");
  check_array("out", out, {weights.size(0), rows.size(1)}, rows.type, "rows'");

  WeightedSum step{};
  step.type = rows.type;
  step.rows = rows.data;
  step.pair_of_row = numbers<int64_t>(pair_of_row);
  step.weights = numbers<float>(weights);
  step.out = out.data;
  step.num_tokens = weights.size(0);
  step.top_k = weights.size(1);
  step.num_rows = rows.size(0);
  step.width = rows.size(1);
  run_kernel([step] { weighted_sum(step); });
}

void find_maximum(const Tensor& rows, const Tensor& largest, const Tensor& indices) {
  check_dims("rows", rows, 2);
  check_float_type("rows", rows);
  check_contiguous("rows", rows, 1);
  if (rows.size(1) == 0) refuse("rows of shape " + shape_text(rows) + " have no largest number");
  check_array("largest", largest, {rows.size(0)}, ElementType::kFloat32, "float32");
  check_array("indices", indices, {rows.size(0)}, ElementType::kInt64, "int64");

  RowMaximum maximum{};
  maximum.type = rows.type;
  maximum.rows = rows.data;
  maximum.row_stride = rows.strides[0];
  maximum.num_rows = rows.size(0);
  maximum.width = rows.size(1);
  maximum.largest = static_cast<float*>(largest.data);
  maximum.indices = static_cast<int64_t*>(indices.data);
  run_kernel([maximum] { find_row_maximum(maximum); });
}

void draw(const Tensor& scores, const Tensor& temperatures, const Tensor& top_k, const Tensor& top_p,
          const Tensor& min_p, const Tensor& uniform, const Tensor& tokens) {
  check_dims("scores", scores, 2);
  check_type("scores", scores, ElementType::kFloat32, "float32");
  check_contiguous("scores", scores, 1);
  if (scores.size(1) == 0) refuse("rows of shape " + shape_text(scores) + " have no tokens");
  const int64_t num_rows = scores.size(0);
  check_array("temperatures", temperatures, {num_rows}, ElementType::kFloat32, "float32");
  check_array("top_k", top_k, {num_rows}, ElementType::kInt64, "int64");
  check_array("top_p", top_p, {num_rows}, ElementType::kFloat32, "float32");
  check_array("min_p", min_p, {num_rows}, ElementType::kFloat32, "float32");
  check_array("uniform", uniform, {num_rows}, ElementType::kFloat64, "float64");
  check_array("tokens", tokens, {num_rows}, ElementType::kInt64, "int64");

  DrawTokens step{};
  step.scores = numbers<float>(scores);
  step.row_stride = scores.strides[0];
  step.num_rows = num_rows;
  step.width = scores.size(1);
  step.temperatures = numbers<float>(temperatures);
  step.top_k = numbers<int64_t>(top_k);
  step.top_p = numbers<float>(top_p);
  step.min_p = numbers<float>(min_p);
  step.uniform = numbers<double>(uniform);
  step.tokens = static_cast<int64_t*>(tokens.data);
  run_kernel([step] { draw_tokens(step); });
}

void add(const Tensor& a, const Tensor& b, const Tensor& out, const std::optional<Tensor>& factor) {
  check_dims("a", a, 2);
  check_float_type("a", a);
  check_contiguous("a", a);
  check_array("b", b, {a.size(0), a.size(1)}, a.type, "a's");
  check_array("out", out, {a.size(0), a.size(1)}, a.type, "a's");

  if (factor) check_array("factor", *factor, {1}, ElementType::kFloat32, "float32");

  const float* multiplier = factor ? numbers<float>(*factor) : nullptr;
  const Addition step{a.type, a.data, b.data, out.data, a.num_elements(), multiplier};
  run_kernel([step] { add_elements(step); });
}

void gate(const Tensor& gates, const Tensor& rows, const Tensor& out, bool is_softplus) {
  check_dims("rows", rows, 2);
  check_float_type("rows", rows);
  check_contiguous("rows", rows);
  check_dims("gates", gates, 2);
  check_type("gates", gates, rows.type, "rows'");
  check_contiguous("gates", gates, 1);
  const bool has_gate_for_each = gates.size(1) != 1;
  check_shape("gates", gates, {rows.size(0), has_gate_for_each ? rows.size(1) : 1});
  check_array("out", out, {rows.size(0), rows.size(1)}, rows.type, "rows'");

  const Gating step{rows.type,    gates.data,       rows.data,         out.data,   rows.size(0),
                    rows.size(1), gates.strides[0], has_gate_for_each, is_softplus};
  run_kernel([step] { gate_rows(step); });
}

}  // namespace

void bind_layers(nb::module_& module) {
  using namespace nb::literals;
  module.def("rms_norm", &norm, "x"_a, "weight"_a, "epsilon"_a, "out"_a, "Write RMSNorm of each row of `x` to `out`.");
  module.def("add_rms_norm", &add_norm, "x"_a, "update"_a, "weight"_a, "epsilon"_a, "sum"_a, "out"_a,
             "Write x + update to `sum` and RMSNorm of each of its rows to `out`.");
  module.def("apply_rope", &rotate, "heads"_a, "cosines"_a, "sines"_a, "is_interleaved"_a, "out"_a,
             "Apply the rotary embedding to the first 2 * F elements of each head. `out` may be `heads`.");
  module.def("route", &choose, "hidden"_a, "weight"_a, "bias"_a.none(), "correction"_a.none(), "experts"_a, "weights"_a,
             nb::kw_only(), "scoring"_a, "num_groups"_a, "num_chosen_groups"_a, "experts_rating_group"_a,
             "is_normalized"_a, "scale"_a, "given"_a.none() = nb::none(), "factors"_a.none() = nb::none(),
             "tolerance"_a = 0.0, "Write the experts of each token, best first, and their weights.");
  module.def("sort_pairs", &sort, "keys"_a, "first_key"_a, "num_known"_a, "order"_a, "counts"_a,
             "Write the indices of the pairs with a counted key, sorted by key, and the number of pairs of each key. "
             "Return the number of indices written. Keys are -1 or in [0, num_known).");
  module.def("order_pairs", &order_by_key, "keys"_a, "first_key"_a, "num_known"_a, "order"_a, "counts"_a,
             "Like `sort_pairs`, but without a result: `order` is filled up with -1.");
  module.def("add_counts", &add_to_totals, "counts"_a, "totals"_a, "Add `counts` to `totals`.");
  module.def(
      "choose_copies", &choose_expert_copies, "experts"_a, "copies"_a, "num_copies"_a, "first_token"_a, "chosen"_a,
      "Write the physical expert of each choice: the copies of an expert are assigned round-robin over the tokens.");
  module.def("gather_rows", &gather, "source"_a, "indices"_a, "divisor"_a, "out"_a,
             "Copy row indices[r] // divisor of `source` to row r of `out`. Rows with index -1 stay unchanged.");
  module.def("scatter_rows", &scatter, "source"_a, "indices"_a, "out"_a,
             "Copy row r of `source` to row indices[r] of `out`, except for index -1. All other rows become zeros.");
  module.def("join_rows", &join, "first"_a, "second"_a, "out"_a,
             "Concatenate the bytes of each row of `first` and of `second`.");
  module.def("weighted_sum", &sum_rows, "rows"_a, "pair_of_row"_a, "weights"_a, "out"_a,
             "Write the weighted sum of the rows of each token, added in the order of k.");
  module.def("add", &add, "a"_a, "b"_a, "out"_a, "factor"_a.none() = nb::none(), "Write a + b, or (a + b) * factor.");
  module.def("gate_rows", &gate, "gates"_a, "rows"_a, "out"_a, "is_softplus"_a = false,
             "Write sigmoid(gate) * row, or softplus(gate) * row. There is a gate for each row or for each element.");
  module.def("row_maximum", &find_maximum, "rows"_a, "largest"_a, "indices"_a,
             "Write the largest number of each row and its first index.");
  module.def("draw_tokens", &draw, "scores"_a, "temperatures"_a, "top_k"_a, "top_p"_a, "min_p"_a, "uniform"_a,
             "tokens"_a, "Write a random token of each row.");
}

}  // namespace moeserve
