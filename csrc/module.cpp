// The Python module moeserve._cpu: checks what it is given, lets go of the interpreter, and calls a kernel.
//
// Tensors come through DLPack, so nothing here knows torch. A wrong argument raises ValueError.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/isa.h"
#include "cpu/paged_attention.h"
#include "cpu/thread_pool.h"

namespace nb = nanobind;

namespace moeserve {

namespace {

using Tensor = nb::ndarray<nb::device::cpu>;

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (int64_t size : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

std::vector<int64_t> shape_of(const Tensor& tensor) {
  std::vector<int64_t> shape;
  for (size_t i = 0; i < tensor.ndim(); ++i) shape.push_back(static_cast<int64_t>(tensor.shape(i)));
  return shape;
}

void check(bool fine, const std::string& message) {
  if (!fine) throw std::invalid_argument(message);
}

void check_shape(const char* name, const Tensor& tensor, const std::vector<int64_t>& expected) {
  const std::vector<int64_t> shape = shape_of(tensor);
  check(shape == expected, std::string(name) + " has shape " + shape_text(shape) + ", expected " + shape_text(expected));
}

void check_dims(const char* name, const Tensor& tensor, size_t dims) {
  check(tensor.ndim() == dims, std::string(name) + " has shape " + shape_text(shape_of(tensor)) + ", expected " +
                                   std::to_string(dims) + " dimensions");
}

// Contiguous from `first_dim` on. A dimension of size 1 may have any stride.
void check_contiguous(const char* name, const Tensor& tensor, size_t first_dim = 0) {
  int64_t expected = 1;
  for (size_t i = tensor.ndim(); i-- > first_dim;) {
    check(tensor.shape(i) <= 1 || tensor.size() == 0 || tensor.stride(i) == expected,
          std::string(name) + " is not contiguous");
    expected *= static_cast<int64_t>(tensor.shape(i));
  }
}

void check_type(const char* name, const Tensor& tensor, nb::dlpack::dtype expected, const char* expected_name) {
  check(tensor.dtype() == expected, std::string(name) + " is not of type " + expected_name);
}

template <typename Number>
const Number* numbers(const Tensor& tensor) {
  return static_cast<const Number*>(tensor.data());
}

// What keys, values and their two caches have in common.
void check_caches(const Tensor& key_cache, const Tensor& value_cache) {
  check_dims("key_cache", key_cache, 4);
  check_shape("value_cache", value_cache, shape_of(key_cache));
  check(value_cache.dtype() == key_cache.dtype(), "value_cache and key_cache differ in type");
  check_contiguous("key_cache", key_cache);
  check_contiguous("value_cache", value_cache);
  check(key_cache.shape(2) > 0, "key_cache has blocks of size 0");
}

void attend(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table,
            const Tensor& row_starts, const Tensor& context_lens, const Tensor& out, double scale,
            std::optional<int64_t> window, int64_t max_rows) {
  constexpr nb::dlpack::dtype kBFloat16{static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1};
  check_dims("query", query, 3);
  check_caches(key_cache, value_cache);
  check_dims("block_table", block_table, 2);
  const auto num_chunks = static_cast<int64_t>(block_table.shape(0));
  const auto num_heads = static_cast<int64_t>(query.shape(1));
  const auto num_kv_heads = static_cast<int64_t>(key_cache.shape(1));
  check_shape("row_starts", row_starts, {num_chunks + 1});
  check_shape("context_lens", context_lens, {num_chunks});
  check_shape("out", out, shape_of(query));
  check(query.shape(2) == key_cache.shape(3), "query has heads of size " + std::to_string(query.shape(2)) +
                                                  ", key_cache of " + std::to_string(key_cache.shape(3)));
  check(num_kv_heads > 0 && num_heads % num_kv_heads == 0,
        "query has " + std::to_string(num_heads) + " heads, not a multiple of the " + std::to_string(num_kv_heads) +
            " of key_cache");
  check(query.dtype() == nb::dtype<float>() || query.dtype() == kBFloat16, "query is neither float32 nor bfloat16");
  check(key_cache.dtype() == query.dtype() && out.dtype() == query.dtype(), "query, caches and out differ in type");
  check_type("block_table", block_table, nb::dtype<int32_t>(), "int32");
  check_type("row_starts", row_starts, nb::dtype<int32_t>(), "int32");
  check_type("context_lens", context_lens, nb::dtype<int32_t>(), "int32");
  check_contiguous("query", query);
  check_contiguous("out", out);
  check_contiguous("block_table", block_table);
  check_contiguous("row_starts", row_starts);
  check_contiguous("context_lens", context_lens);
  check(!window || *window > 0, "window=" + std::to_string(window.value_or(0)) + ", but it must be at least 1 or None");

  PagedAttention step{};
  step.type = query.dtype() == kBFloat16 ? ElementType::kBFloat16 : ElementType::kFloat32;
  step.query = query.data();
  step.key_cache = key_cache.data();
  step.value_cache = value_cache.data();
  step.block_table = numbers<int32_t>(block_table);
  step.row_starts = numbers<int32_t>(row_starts);
  step.context_lens = numbers<int32_t>(context_lens);
  step.out = out.data();
  step.num_tokens = static_cast<int64_t>(query.shape(0));
  step.num_chunks = num_chunks;
  step.num_heads = num_heads;
  step.num_kv_heads = num_kv_heads;
  step.head_size = static_cast<int64_t>(query.shape(2));
  step.num_blocks = static_cast<int64_t>(key_cache.shape(0));
  step.block_size = static_cast<int64_t>(key_cache.shape(2));
  step.max_blocks = static_cast<int64_t>(block_table.shape(1));
  step.scale = static_cast<float>(scale);
  step.window = window.value_or(0);
  step.max_rows = max_rows;
  const nb::gil_scoped_release released;
  paged_attention(step);
}

void write(const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
           const Tensor& slots) {
  check_dims("key", key, 3);
  check_caches(key_cache, value_cache);
  const auto num_tokens = static_cast<int64_t>(key.shape(0));
  const auto num_kv_heads = static_cast<int64_t>(key_cache.shape(1));
  const auto head_size = static_cast<int64_t>(key_cache.shape(3));
  check_shape("key", key, {num_tokens, num_kv_heads, head_size});
  check_shape("value", value, {num_tokens, num_kv_heads, head_size});
  check_shape("slots", slots, {num_tokens});
  check(key.dtype() == key_cache.dtype() && value.dtype() == key_cache.dtype(),
        "key, value and the caches differ in type");
  check(key.dtype().lanes == 1 && key.dtype().bits % 8 == 0, "key has elements that are not whole bytes");
  check_type("slots", slots, nb::dtype<int64_t>(), "int64");
  check_contiguous("key", key, 2);
  check_contiguous("value", value, 2);
  check_contiguous("slots", slots);

  CacheWrite step{};
  step.element_bytes = key.dtype().bits / 8;
  step.key = key.data();
  step.value = value.data();
  step.key_cache = key_cache.data();
  step.value_cache = value_cache.data();
  step.slots = numbers<int64_t>(slots);
  step.num_tokens = num_tokens;
  step.num_kv_heads = num_kv_heads;
  step.head_size = head_size;
  step.num_blocks = static_cast<int64_t>(key_cache.shape(0));
  step.block_size = static_cast<int64_t>(key_cache.shape(2));
  step.key_token_stride = key.stride(0);
  step.key_head_stride = key.stride(1);
  step.value_token_stride = value.stride(0);
  step.value_head_stride = value.stride(1);
  const nb::gil_scoped_release released;
  write_cache(step);
}

std::vector<std::string> usable_isa_names() {
  std::vector<std::string> names;
  for (Isa isa : usable_isas()) names.push_back(isa_name(isa));
  return names;
}

}  // namespace

}  // namespace moeserve

NB_MODULE(_cpu, module) {
  using namespace nb::literals;
  module.doc() = "C++ kernels of moeserve for CPUs. Called by moeserve.ops only.";

  module.def("paged_attention", &moeserve::attend, "query"_a, "key_cache"_a, "value_cache"_a, "block_table"_a,
             "row_starts"_a, "context_lens"_a, "out"_a, nb::kw_only(), "scale"_a, "window"_a.none(), "max_rows"_a,
             "Writes to `out` the rows of chunks with at most `max_rows` rows.");
  module.def("write_cache", &moeserve::write, "key"_a, "value"_a, "key_cache"_a, "value_cache"_a, "slots"_a,
             "Stores each token's key and value at its slot; -1 is skipped.");

  module.def("set_num_threads", &moeserve::set_num_threads, "num_threads"_a, "Threads that kernels may use.");
  module.def("num_threads", &moeserve::num_threads);
  module.def("isa", [] { return moeserve::isa_name(moeserve::current_isa()); },
             "The instruction set that kernels run with.");
  module.def("usable_isas", &moeserve::usable_isa_names, "Those that this machine can run, best first.");
  module.def("set_isa", [](const std::string& name) { moeserve::set_isa(moeserve::isa_of_name(name)); }, "name"_a,
             "Makes kernels run with one of `usable_isas()`; for tests and benchmarks.");
}
