// Bindings of indexers and of the norm of their keys.

#include <algorithm>

#include "arguments.h"
#include "bindings.h"
#include "cpu/block_choice.h"
#include "cpu/indexer.h"
#include "cpu/layer_norm.h"
#include "cpu_graph.h"

namespace nb = nanobind;

namespace moeserve {

namespace {

void norm(const Tensor& rows, const Tensor& weight, const Tensor& bias, double epsilon, const Tensor& out) {
  check_dims("rows", rows, 2);
  check_float_type("rows", rows);
  check_contiguous("rows", rows, 1);
  const int64_t width = rows.size(1);
  check_array("weight", weight, {width}, rows.type, "rows'");
  check_array("bias", bias, {width}, rows.type, "rows'");
  check_dims("out", out, 2);
  check_contiguous("out", out, 1);
  if (out.type != rows.type || out.size(0) != rows.size(0) || out.size(1) != width) refuse("out is not like rows");

  LayerNorm step{};
  step.type = rows.type;
  step.rows = rows.data;
  step.weight = weight.data;
  step.bias = bias.data;
  step.out = out.data;
  step.row_stride = rows.strides[0];
  step.out_stride = out.strides[0];
  step.num_rows = rows.size(0);
  step.width = width;
  step.epsilon = static_cast<float>(epsilon);
  run_kernel([step] { layer_norm(step); });
}

void choose(const Tensor& query, const Tensor& weights, const Tensor& key_cache, const Tensor& block_table,
            const Tensor& row_starts, const Tensor& context_lens, const Tensor& slots, const Tensor& counts,
            const Tensor& starts, int64_t top_k, int64_t tokens_per_entry, bool is_expanded) {
  check_dims("query", query, 3);
  check_float_type("query", query);
  check_contiguous("query", query, 2);
  const int64_t num_tokens = query.size(0), num_heads = query.size(1), head_size = query.size(2);
  check_shape("weights", weights, {num_tokens, num_heads});
  check_type("weights", weights, query.type, "query's");
  check_contiguous("weights", weights, 1);
  check_dims("key_cache", key_cache, 3);
  const int64_t num_blocks = key_cache.size(0), block_size = key_cache.size(1);
  check_array("key_cache", key_cache, {num_blocks, block_size, head_size}, query.type, "query's");
  if (block_size == 0 || num_blocks * block_size > INT32_MAX) {
    refuse("key_cache of shape " + shape_text(key_cache) + ", expected 1 to 2^31 - 1 entries");
  }
  check_dims("block_table", block_table, 2);
  const int64_t num_chunks = block_table.size(0);
  check_array("block_table", block_table, {num_chunks, block_table.size(1)}, ElementType::kInt32, "int32");
  check_array("row_starts", row_starts, {num_chunks + 1}, ElementType::kInt32, "int32");
  check_array("context_lens", context_lens, {num_chunks}, ElementType::kInt32, "int32");
  check_dims("slots", slots, 2);
  check_array("slots", slots, {num_tokens, slots.size(1)}, ElementType::kInt32, "int32");
  check_array("counts", counts, {num_tokens}, ElementType::kInt32, "int32");
  check_array("starts", starts, {num_tokens + 1}, ElementType::kInt32, "int32");
  if (top_k < 1 || tokens_per_entry < 1) {
    refuse("top_k=" + std::to_string(top_k) + " and tokens_per_entry=" + std::to_string(tokens_per_entry) +
           ", but both must be at least 1");
  }
  if (is_expanded && tokens_per_entry > INT32_MAX / (num_blocks * block_size)) {
    refuse("the entries of key_cache of shape " + shape_text(key_cache) + " have more tokens than 2^31 - 1");
  }

  Indexer step{};
  step.type = query.type;
  step.query = query.data;
  step.weights = weights.data;
  step.key_cache = key_cache.data;
  step.block_table = numbers<int32_t>(block_table);
  step.row_starts = numbers<int32_t>(row_starts);
  step.context_lens = numbers<int32_t>(context_lens);
  step.slots = static_cast<int32_t*>(slots.data);
  step.counts = static_cast<int32_t*>(counts.data);
  step.starts = static_cast<int32_t*>(starts.data);
  step.query_token_stride = query.strides[0];
  step.query_head_stride = query.strides[1];
  step.weight_stride = weights.strides[0];
  step.num_tokens = num_tokens;
  step.num_chunks = num_chunks;
  step.num_heads = num_heads;
  step.head_size = head_size;
  step.num_blocks = num_blocks;
  step.block_size = block_size;
  step.max_blocks = block_table.size(1);
  step.num_places = slots.size(1);
  step.top_k = top_k;
  step.tokens_per_entry = tokens_per_entry;
  step.is_expanded = is_expanded;
  run_kernel([step] { choose_entries(step); });
}

void choose_of_context(const Tensor& query, const Tensor& key_cache, const Tensor& block_table,
                       const Tensor& row_starts, const Tensor& context_lens, const Tensor& pieces, const Tensor& counts,
                       const Tensor& starts, int64_t num_kv_heads, int64_t chosen_size, int64_t piece_size,
                       int64_t top_k, int64_t num_local) {
  check_dims("query", query, 3);
  check_float_type("query", query);
  check_contiguous("query", query, 2);
  const int64_t num_tokens = query.size(0), num_heads = query.size(1), head_size = query.size(2);
  check_dims("key_cache", key_cache, 3);
  const int64_t num_blocks = key_cache.size(0), block_size = key_cache.size(1);
  check_array("key_cache", key_cache, {num_blocks, block_size, head_size}, query.type, "query's");
  check_dims("block_table", block_table, 2);
  const int64_t num_chunks = block_table.size(0);
  check_array("block_table", block_table, {num_chunks, block_table.size(1)}, ElementType::kInt32, "int32");
  check_array("row_starts", row_starts, {num_chunks + 1}, ElementType::kInt32, "int32");
  check_array("context_lens", context_lens, {num_chunks}, ElementType::kInt32, "int32");
  const int64_t num_pairs = std::max(num_heads, num_kv_heads);
  if (num_heads < 1 || num_kv_heads < 1 || num_pairs % num_heads != 0 || num_pairs % num_kv_heads != 0) {
    refuse("of " + std::to_string(num_heads) + " and num_kv_heads=" + std::to_string(num_kv_heads) +
           " heads, one number must divide the other");
  }
  if (piece_size < 1 || chosen_size < 1 || block_size < 1 || block_size % piece_size != 0 ||
      chosen_size % piece_size != 0) {
    refuse("piece_size=" + std::to_string(piece_size) + " must divide chosen_size=" + std::to_string(chosen_size) +
           " and the block size " + std::to_string(block_size));
  }
  if (num_blocks * num_kv_heads * block_size / piece_size > INT32_MAX)
    refuse("key_cache has more than 2^31 - 1 pieces");
  if (top_k < 1 || num_local < 0 || num_local > top_k) {
    refuse("top_k=" + std::to_string(top_k) + " must be at least 1 and num_local=" + std::to_string(num_local));
  }
  check_dims("pieces", pieces, 2);
  check_array("pieces", pieces, {num_tokens * num_pairs, pieces.size(1)}, ElementType::kInt32, "int32");
  check_array("counts", counts, {num_tokens * num_pairs}, ElementType::kInt32, "int32");
  check_array("starts", starts, {num_tokens * num_pairs + 1}, ElementType::kInt32, "int32");

  BlockChoice step{};
  step.type = query.type;
  step.query = query.data;
  step.key_cache = key_cache.data;
  step.block_table = numbers<int32_t>(block_table);
  step.row_starts = numbers<int32_t>(row_starts);
  step.context_lens = numbers<int32_t>(context_lens);
  step.pieces = static_cast<int32_t*>(pieces.data);
  step.counts = static_cast<int32_t*>(counts.data);
  step.starts = static_cast<int32_t*>(starts.data);
  step.query_token_stride = query.strides[0];
  step.query_head_stride = query.strides[1];
  step.num_tokens = num_tokens;
  step.num_chunks = num_chunks;
  step.num_heads = num_heads;
  step.num_kv_heads = num_kv_heads;
  step.num_pairs = num_pairs;
  step.head_size = head_size;
  step.num_blocks = num_blocks;
  step.block_size = block_size;
  step.max_blocks = block_table.size(1);
  step.max_pieces = pieces.size(1);
  step.chosen_size = chosen_size;
  step.piece_size = piece_size;
  step.top_k = top_k;
  step.num_local = num_local;
  run_kernel([step] { choose_blocks(step); });
}

}  // namespace

void bind_indexer(nb::module_& module) {
  using namespace nb::literals;
  module.def("layer_norm", &norm, "rows"_a, "weight"_a, "bias"_a, "epsilon"_a, "out"_a,
             "Write LayerNorm of each row to `out`, which may be `rows`.");
  module.def("choose_entries", &choose, "query"_a, "weights"_a, "key_cache"_a, "block_table"_a, "row_starts"_a,
             "context_lens"_a, "slots"_a, "counts"_a, "starts"_a, nb::kw_only(), "top_k"_a, "tokens_per_entry"_a,
             "is_expanded"_a, "Write the slots of the entries with the highest scores of each row, and their numbers.");
  module.def("choose_blocks", &choose_of_context, "query"_a, "key_cache"_a, "block_table"_a, "row_starts"_a,
             "context_lens"_a, "pieces"_a, "counts"_a, "starts"_a, nb::kw_only(), "num_kv_heads"_a, "chosen_size"_a,
             "piece_size"_a, "top_k"_a, "num_local"_a,
             "Write the pieces of the blocks with the highest scores of each row and pair of heads.");
}

}  // namespace moeserve
