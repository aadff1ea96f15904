// Bindings of compressed entries and of hyper-connections.

#include <nanobind/stl/optional.h>

#include <optional>

#include "arguments.h"
#include "bindings.h"
#include "cpu/compressed_attention.h"
#include "cpu/hyper_connections.h"
#include "cpu_graph.h"

namespace nb = nanobind;

namespace moeserve {

namespace {

ChunksOfRequests read_chunks(const Tensor& slots, const Tensor& block_table, const Tensor& row_starts,
                             const Tensor& context_lens, int64_t num_blocks, int64_t block_size) {
  check_dims("slots", slots, 1);
  check_array("slots", slots, {slots.size(0)}, ElementType::kInt64, "int64");
  check_dims("block_table", block_table, 2);
  const int64_t num_chunks = block_table.size(0);
  check_array("block_table", block_table, {num_chunks, block_table.size(1)}, ElementType::kInt32, "int32");
  check_array("row_starts", row_starts, {num_chunks + 1}, ElementType::kInt32, "int32");
  check_array("context_lens", context_lens, {num_chunks}, ElementType::kInt32, "int32");
  if (block_size < 1) refuse("block_size=" + std::to_string(block_size) + ", but it must be at least 1");

  ChunksOfRequests chunks{};
  chunks.slots = numbers<int64_t>(slots);
  chunks.block_table = numbers<int32_t>(block_table);
  chunks.row_starts = numbers<int32_t>(row_starts);
  chunks.context_lens = numbers<int32_t>(context_lens);
  chunks.num_tokens = slots.size(0);
  chunks.num_chunks = num_chunks;
  chunks.max_blocks = block_table.size(1);
  chunks.num_blocks = num_blocks;
  chunks.block_size = block_size;
  return chunks;
}

void pool(const Tensor& projected, const Tensor& bias, const Tensor& tails, const Tensor& slots,
          const Tensor& block_table, const Tensor& row_starts, const Tensor& context_lens,
          const std::optional<Tensor>& num_drafts, const Tensor& out, int64_t block_size) {
  check_dims("out", out, 2);
  const int64_t num_tokens = slots.size(0), size = out.size(1);
  check_dims("bias", bias, 2);
  const int64_t width = bias.size(1), num_series = size == 0 ? 0 : width / size;
  if (bias.size(0) < 1 || (num_series != 1 && num_series != 2) || width != num_series * size) {
    refuse("bias of shape " + shape_text(bias) + " does not fit out of shape " + shape_text(out));
  }
  check_array("bias", bias, {bias.size(0), width}, ElementType::kFloat32, "float32");
  check_dims("tails", tails, 2);
  check_array("tails", tails, {tails.size(0), 3 * width}, ElementType::kFloat32, "float32");
  check_shape("projected", projected, {num_tokens, 2 * width});
  check_float_type("projected", projected);
  check_contiguous("projected", projected, 1);
  check_array("out", out, {num_tokens, size}, projected.type, "projected's");

  WindowPooling step{};
  step.type = projected.type;
  step.projected = projected.data;
  step.row_stride = projected.strides[0];
  step.bias = numbers<float>(bias);
  step.tails = static_cast<float*>(tails.data);
  step.out = out.data;
  step.ratio = bias.size(0);
  step.num_series = num_series;
  step.size = size;
  step.chunks = read_chunks(slots, block_table, row_starts, context_lens, tails.size(0), block_size);
  if (num_drafts) {
    check_array("num_drafts", *num_drafts, {step.chunks.num_chunks}, ElementType::kInt32, "int32");
    step.num_drafts = numbers<int32_t>(*num_drafts);
  }
  run_kernel([step] { pool_windows(step); });
}

void find_slots(const Tensor& slots, const Tensor& block_table, const Tensor& row_starts, const Tensor& context_lens,
                const Tensor& entry_slots, int64_t num_blocks, int64_t block_size, int64_t ratio,
                int64_t entries_of_block) {
  const ChunksOfRequests chunks = read_chunks(slots, block_table, row_starts, context_lens, num_blocks, block_size);
  check_array("entry_slots", entry_slots, {chunks.num_tokens}, ElementType::kInt64, "int64");
  if (ratio < 1) refuse("ratio=" + std::to_string(ratio) + ", but it must be at least 1");
  auto* out = static_cast<int64_t*>(entry_slots.data);
  run_kernel([=] { find_entry_slots(chunks, ratio, entries_of_block, out); });
}

void list(const Tensor& slots, const Tensor& block_table, const Tensor& row_starts, const Tensor& context_lens,
          const Tensor& window_table, const std::optional<Tensor>& chosen, const std::optional<Tensor>& chosen_counts,
          const Tensor& listed, const Tensor& counts, const Tensor& starts, int64_t num_blocks, int64_t block_size,
          int64_t num_window_blocks, int64_t entries_of_block, std::optional<int64_t> ratio, int64_t window) {
  const ChunksOfRequests chunks = read_chunks(slots, block_table, row_starts, context_lens, num_blocks, block_size);
  if ((ratio && *ratio < 1) || window < 1) refuse("ratio and window must be at least 1");
  if (num_window_blocks * block_size + num_blocks * entries_of_block > INT32_MAX) {
    refuse("the cache has more vectors than 2^31 - 1");
  }
  check_array("window_table", window_table, {chunks.num_chunks, chunks.max_blocks}, ElementType::kInt32, "int32");
  VectorLists lists{};
  lists.window_table = numbers<int32_t>(window_table);
  lists.num_window_blocks = num_window_blocks;
  lists.window = window;
  lists.ratio = ratio.value_or(0);
  lists.entries_of_block = entries_of_block;
  if (chosen.has_value() != chosen_counts.has_value()) refuse("chosen and chosen_counts go together");
  if (chosen) {
    check_dims("chosen", *chosen, 2);
    check_array("chosen", *chosen, {chunks.num_tokens, chosen->size(1)}, ElementType::kInt32, "int32");
    check_array("chosen_counts", *chosen_counts, {chunks.num_tokens}, ElementType::kInt32, "int32");
    lists.chosen = numbers<int32_t>(*chosen);
    lists.chosen_counts = numbers<int32_t>(*chosen_counts);
    lists.num_places = chosen->size(1);
  }
  check_dims("listed", listed, 2);
  check_array("listed", listed, {chunks.num_tokens, listed.size(1)}, ElementType::kInt32, "int32");
  check_array("counts", counts, {chunks.num_tokens}, ElementType::kInt32, "int32");
  check_array("starts", starts, {chunks.num_tokens + 1}, ElementType::kInt32, "int32");
  lists.listed = static_cast<int32_t*>(listed.data);
  lists.counts = static_cast<int32_t*>(counts.data);
  lists.starts = static_cast<int32_t*>(starts.data);
  lists.num_listed = listed.size(1);
  run_kernel([chunks, lists] { list_vectors(chunks, lists); });
}

void check_streams(const Tensor& streams, int64_t num_streams) {
  check_dims("streams", streams, 2);
  check_float_type("streams", streams);
  check_contiguous("streams", streams);
  if (num_streams < 1 || num_streams > kMaxStreams || streams.size(1) % num_streams != 0) {
    refuse("streams of shape " + shape_text(streams) + " cannot be " + std::to_string(num_streams) + " streams");
  }
}

void collapse(const Tensor& streams, const Tensor& map, const Tensor& base, const Tensor& scales,
              const Tensor& coefficients, const Tensor& out, int64_t num_streams, int64_t num_iterations,
              double epsilon, double norm_epsilon, double output_factor, double output_epsilon) {
  check_streams(streams, num_streams);
  const int64_t num_tokens = streams.size(0), size = streams.size(1);
  check_dims("scales", scales, 1);
  const int64_t num_kinds = std::min<int64_t>(scales.size(0), 3);
  const int64_t num_coefficients = num_streams * (num_kinds == 3 ? 2 + num_streams : num_kinds);
  check_array("scales", scales, {num_kinds}, ElementType::kFloat32, "float32");
  check_array("map", map, {num_coefficients, size}, ElementType::kFloat32, "float32");
  check_array("base", base, {num_coefficients}, ElementType::kFloat32, "float32");
  check_array("coefficients", coefficients, {num_tokens, num_coefficients}, ElementType::kFloat32, "float32");
  check_array("out", out, {num_tokens, size / num_streams}, streams.type, "streams'");

  StreamCollapse step{};
  step.type = streams.type;
  step.streams = streams.data;
  step.map = numbers<float>(map);
  step.base = numbers<float>(base);
  step.scales = numbers<float>(scales);
  step.coefficients = static_cast<float*>(coefficients.data);
  step.out = out.data;
  step.num_tokens = num_tokens;
  step.num_streams = num_streams;
  step.num_coefficients = num_coefficients;
  step.width = size / num_streams;
  step.num_iterations = num_iterations;
  step.epsilon = static_cast<float>(epsilon);
  step.norm_epsilon = static_cast<float>(norm_epsilon);
  step.output_factor = static_cast<float>(output_factor);
  step.output_epsilon = static_cast<float>(output_epsilon);
  run_kernel([step] { collapse_streams(step); });
}

void expand(const Tensor& streams, const Tensor& update, const Tensor& coefficients, const Tensor& out,
            int64_t num_streams) {
  check_streams(streams, num_streams);
  const int64_t num_tokens = streams.size(0), width = streams.size(1) / num_streams;
  check_array("update", update, {num_tokens, width}, streams.type, "streams'");
  check_dims("coefficients", coefficients, 2);
  const bool has_matrix = coefficients.size(1) != 2 * num_streams;
  const int64_t num_coefficients = num_streams * (has_matrix ? 2 + num_streams : 2);
  check_array("coefficients", coefficients, {num_tokens, num_coefficients}, ElementType::kFloat32, "float32");
  check_array("out", out, {num_tokens, streams.size(1)}, streams.type, "streams'");

  StreamExpansion step{};
  step.type = streams.type;
  step.streams = streams.data;
  step.update = update.data;
  step.coefficients = numbers<float>(coefficients);
  step.out = out.data;
  step.num_tokens = num_tokens;
  step.num_streams = num_streams;
  step.num_coefficients = num_coefficients;
  step.width = width;
  run_kernel([step] { expand_streams(step); });
}

}  // namespace

void bind_compressed_attention(nb::module_& module) {
  using namespace nb::literals;
  module.def("pool_windows", &pool, "projected"_a, "bias"_a, "tails"_a, "slots"_a, "block_table"_a, "row_starts"_a,
             "context_lens"_a, "num_drafts"_a.none(), "out"_a, nb::kw_only(), "block_size"_a,
             "Update tails, and write the pooled values of each window in the row of its last token.");
  module.def("find_entry_slots", &find_slots, "slots"_a, "block_table"_a, "row_starts"_a, "context_lens"_a,
             "entry_slots"_a, nb::kw_only(), "num_blocks"_a, "block_size"_a, "ratio"_a, "entries_of_block"_a,
             "Write the slot of the entry of each window in the row of its last token, and -1 in other rows.");
  module.def("list_vectors", &list, "slots"_a, "block_table"_a, "row_starts"_a, "context_lens"_a, "window_table"_a,
             "chosen"_a.none(), "chosen_counts"_a.none(), "listed"_a, "counts"_a, "starts"_a, nb::kw_only(),
             "num_blocks"_a, "block_size"_a, "num_window_blocks"_a, "entries_of_block"_a, "ratio"_a.none(), "window"_a,
             "Write the vectors that each row attends to.");
  module.def("collapse_streams", &collapse, "streams"_a, "map"_a, "base"_a, "scales"_a, "coefficients"_a, "out"_a,
             nb::kw_only(), "num_streams"_a, "num_iterations"_a, "epsilon"_a, "norm_epsilon"_a, "output_factor"_a = 2.0,
             "output_epsilon"_a = 0.0, "Write the coefficients of each token, and the weighted sum of its streams.");
  module.def("expand_streams", &expand, "streams"_a, "update"_a, "coefficients"_a, "out"_a, nb::kw_only(),
             "num_streams"_a, "Write the streams behind a network with these outputs.");
}

}  // namespace moeserve
