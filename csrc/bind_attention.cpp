// Bindings of attention and of KV cache writes.

#include <nanobind/stl/optional.h>

#include <optional>

#include "arguments.h"
#include "bindings.h"
#include "cpu/cache_write.h"
#include "cpu/paged_attention.h"
#include "cpu_graph.h"

namespace nb = nanobind;

namespace moeserve {

namespace {

void check_key_cache(const Tensor& key_cache) {
  check_dims("key_cache", key_cache, 4);
  check_contiguous("key_cache", key_cache);
  if (key_cache.size(1) == 0 || key_cache.size(2) == 0) {
    refuse("key_cache has shape " + shape_text(key_cache) + ", expected at least 1 head and blocks of at least 1");
  }
}

// Check the scales of a cache of 8-bit floats, whose type must be uint8.
BFloat16* scales_of(const char* name, const Tensor& scales, const Tensor& cache) {
  check_type("a cache with scales", cache, ElementType::kUInt8, "uint8");
  check_array(name, scales, {cache.size(0), cache.size(1), cache.size(2)}, ElementType::kBFloat16, "bfloat16");
  return static_cast<BFloat16*>(scales.data);
}

// Check a cache of values, which may have smaller heads than the keys.
void check_value_cache(const Tensor& value_cache, const Tensor& key_cache) {
  check_dims("value_cache", value_cache, 4);
  const int64_t value_size = value_cache.size(3);
  check_array("value_cache", value_cache, {key_cache.size(0), key_cache.size(1), key_cache.size(2), value_size},
              key_cache.type, "key_cache's");
  if (value_size > key_cache.size(3)) {
    refuse("value_cache of shape " + shape_text(value_cache) + " has larger heads than key_cache of shape " +
           shape_text(key_cache));
  }
}

void attend(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table,
            const Tensor& row_starts, const Tensor& context_lens, const Tensor& out, double scale,
            std::optional<int64_t> window, std::optional<int64_t> value_size, const std::optional<Tensor>& sinks,
            std::optional<int64_t> whole_group_size, const std::optional<Tensor>& key_scales,
            const std::optional<Tensor>& value_scales, const std::optional<Tensor>& biases) {
  check_key_cache(key_cache);
  check_value_cache(value_cache, key_cache);
  check_dims("query", query, 3);
  const int64_t num_heads = query.size(1);
  const int64_t head_size = query.size(2);
  const int64_t num_kv_heads = key_cache.size(1);
  if (head_size != key_cache.size(3) || num_heads % num_kv_heads != 0) {
    refuse("query of shape " + shape_text(query) + " does not fit key_cache of shape " + shape_text(key_cache));
  }
  const int64_t cached_size = value_cache.size(3);
  const int64_t out_size = value_size.value_or(cached_size);
  const bool shares_rows = value_cache.data == key_cache.data;
  if (out_size < 0 || out_size > cached_size || (!shares_rows && out_size != cached_size)) {
    refuse("value_size=" + std::to_string(out_size) + ", but a row of the cache has " + std::to_string(cached_size) +
           " elements");
  }
  check_float_type("query", query);
  check_contiguous("query", query, 2);
  if (key_scales.has_value() != value_scales.has_value()) refuse("key_scales and value_scales go together");
  if (!key_scales) check_type("key_cache", key_cache, query.type, "query's");
  check_array("out", out, {query.size(0), num_heads, out_size}, query.type, "query's");
  if (sinks && sinks->num_dims == 2) {
    check_array("sinks", *sinks, {query.size(0), num_heads}, ElementType::kFloat32, "float32");
  } else if (sinks) {
    check_array("sinks", *sinks, {num_heads}, ElementType::kFloat32, "float32");
  }
  if (biases) {
    check_dims("biases", *biases, 3);
    check_array("biases", *biases, {query.size(0), num_heads, biases->size(2)}, query.type, "query's");
  }
  check_dims("block_table", block_table, 2);
  const int64_t num_chunks = block_table.size(0);
  check_array("block_table", block_table, {num_chunks, block_table.size(1)}, ElementType::kInt32, "int32");
  check_array("row_starts", row_starts, {num_chunks + 1}, ElementType::kInt32, "int32");
  check_array("context_lens", context_lens, {num_chunks}, ElementType::kInt32, "int32");
  if (window && *window == 0) refuse("window=0, but it must be at least 1, negative or None");

  PagedAttention step{};
  step.type = query.type;
  step.query = query.data;
  step.key_cache = key_cache.data;
  step.value_cache = value_cache.data;
  if (key_scales) {
    step.key_scales = scales_of("key_scales", *key_scales, key_cache);
    step.value_scales = scales_of("value_scales", *value_scales, value_cache);
  }
  step.block_table = numbers<int32_t>(block_table);
  step.row_starts = numbers<int32_t>(row_starts);
  step.context_lens = numbers<int32_t>(context_lens);
  step.sinks = sinks ? numbers<float>(*sinks) : nullptr;
  step.has_token_sinks = sinks && sinks->num_dims == 2;
  step.out = out.data;
  step.query_token_stride = query.strides[0];
  step.query_head_stride = query.strides[1];
  step.num_tokens = query.size(0);
  step.num_chunks = num_chunks;
  step.num_heads = num_heads;
  step.num_kv_heads = num_kv_heads;
  step.whole_group_size = whole_group_size.value_or(num_heads / num_kv_heads);
  step.head_size = head_size;
  step.value_size = out_size;
  step.num_blocks = key_cache.size(0);
  step.block_size = key_cache.size(2);
  step.max_blocks = block_table.size(1);
  step.scale = static_cast<float>(scale);
  step.window = window.value_or(0);
  if (biases) {
    step.biases = biases->data;
    step.num_distances = biases->size(2);
  }
  run_kernel([step] { paged_attention(step); });
}

void write(const Tensor& key, const std::optional<Tensor>& value, const Tensor& key_cache,
           const std::optional<Tensor>& value_cache, const Tensor& slots, const std::optional<Tensor>& key_scales,
           const std::optional<Tensor>& value_scales) {
  check_key_cache(key_cache);
  check_dims("slots", slots, 1);
  check_shape("key", key, {slots.size(0), key_cache.size(1), key_cache.size(3)});
  if (key_scales) {
    check_float_type("key", key);
  } else {
    check_type("key", key, key_cache.type, "key_cache's");
  }
  check_type("slots", slots, ElementType::kInt64, "int64");
  check_contiguous("key", key, 2);
  check_contiguous("slots", slots);

  CacheWrite step{};
  step.type = key.type;
  step.key = key.data;
  step.key_cache = key_cache.data;
  step.slots = numbers<int64_t>(slots);
  step.num_tokens = slots.size(0);
  step.num_kv_heads = key_cache.size(1);
  step.head_size = key_cache.size(3);
  step.num_blocks = key_cache.size(0);
  step.block_size = key_cache.size(2);
  step.key_token_stride = key.strides[0];
  step.key_head_stride = key.strides[1];
  if (value.has_value() != value_cache.has_value()) refuse("value and value_cache go together: one of them is None");
  if (value) {
    check_value_cache(*value_cache, key_cache);
    check_shape("value", *value, {slots.size(0), key_cache.size(1), value_cache->size(3)});
    check_type("value", *value, key.type, "key's");
    check_contiguous("value", *value, 2);
    step.value = value->data;
    step.value_cache = value_cache->data;
    step.value_size = value_cache->size(3);
    step.value_token_stride = value->strides[0];
    step.value_head_stride = value->strides[1];
  }
  if (key_scales.has_value() != value_scales.has_value() || (key_scales && !value)) {
    refuse("key_scales and value_scales go together, and with value");
  }
  if (key_scales) {
    step.key_scales = scales_of("key_scales", *key_scales, key_cache);
    step.value_scales = scales_of("value_scales", *value_scales, *value_cache);
  }
  run_kernel([step] { write_cache(step); });
}

}  // namespace

void bind_attention(nb::module_& module) {
  using namespace nb::literals;
  module.def("paged_attention", &attend, "query"_a, "key_cache"_a, "value_cache"_a, "block_table"_a, "row_starts"_a,
             "context_lens"_a, "out"_a, nb::kw_only(), "scale"_a, "window"_a.none(), "value_size"_a.none() = nb::none(),
             "sinks"_a.none() = nb::none(), "whole_group_size"_a.none() = nb::none(),
             "key_scales"_a.none() = nb::none(), "value_scales"_a.none() = nb::none(), "biases"_a.none() = nb::none(),
             "Write the attention of each row to `out`. Rows outside all chunks and rows before position 0 get zeros.");
  module.def("write_cache", &write, "key"_a, "value"_a.none(), "key_cache"_a, "value_cache"_a.none(), "slots"_a,
             "key_scales"_a.none() = nb::none(), "value_scales"_a.none() = nb::none(),
             "Store the key and the optional value of each token at its slot. Slot -1 is skipped.");
}

}  // namespace moeserve
