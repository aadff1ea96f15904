// The Python module moeserve._cpu: checks what it is given, lets go of the interpreter, and calls a kernel.
//
// Tensors come through DLPack, so nothing here knows torch. A wrong argument raises ValueError.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/cache_write.h"
#include "cpu/isa.h"
#include "cpu/paged_attention.h"
#include "cpu/parallel.h"

namespace nb = nanobind;

namespace moeserve {

namespace {

using Tensor = nb::ndarray<nb::device::cpu>;

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (size_t i = 0; i < tensor.ndim(); ++i) text += (i > 0 ? ", " : "") + std::to_string(tensor.shape(i));
  return text + "]";
}

int64_t size(const Tensor& tensor, size_t dim) { return static_cast<int64_t>(tensor.shape(dim)); }

void check_dims(const char* name, const Tensor& tensor, size_t dims) {
  if (tensor.ndim() == dims) return;
  refuse(std::string(name) + " has shape " + shape_text(tensor) + ", expected " + std::to_string(dims) + " dimensions");
}

void check_shape(const char* name, const Tensor& tensor, std::initializer_list<int64_t> expected) {
  bool equal = tensor.ndim() == expected.size();
  for (size_t i = 0; equal && i < tensor.ndim(); ++i) equal = size(tensor, i) == expected.begin()[i];
  if (equal) return;
  std::string text;
  for (int64_t size : expected) text += (text.empty() ? "" : ", ") + std::to_string(size);
  refuse(std::string(name) + " has shape " + shape_text(tensor) + ", expected [" + text + "]");
}

// Contiguous from `first_dim` on. A dimension of size 1 may have any stride.
void check_contiguous(const char* name, const Tensor& tensor, size_t first_dim = 0) {
  if (tensor.size() == 0) return;
  int64_t expected = 1;
  for (size_t i = tensor.ndim(); i-- > first_dim;) {
    if (size(tensor, i) > 1 && tensor.stride(i) != expected) refuse(std::string(name) + " is not contiguous");
    expected *= size(tensor, i);
  }
}

void check_type(const char* name, const Tensor& tensor, nb::dlpack::dtype expected, const char* expected_name) {
  if (tensor.dtype() != expected) refuse(std::string(name) + " is not of type " + expected_name);
}

template <typename Number>
const Number* numbers(const Tensor& tensor) {
  return static_cast<const Number*>(tensor.data());
}

void check_key_cache(const Tensor& key_cache) {
  check_dims("key_cache", key_cache, 4);
  check_contiguous("key_cache", key_cache);
  if (size(key_cache, 1) == 0 || size(key_cache, 2) == 0) {
    refuse("key_cache has shape " + shape_text(key_cache) + ", expected at least 1 head and blocks of at least 1");
  }
}

void check_value_cache(const Tensor& value_cache, const Tensor& key_cache) {
  check_shape("value_cache", value_cache,
              {size(key_cache, 0), size(key_cache, 1), size(key_cache, 2), size(key_cache, 3)});
  check_type("value_cache", value_cache, key_cache.dtype(), "key_cache's");
  check_contiguous("value_cache", value_cache);
}

void attend(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table,
            const Tensor& row_starts, const Tensor& context_lens, const Tensor& out, double scale,
            std::optional<int64_t> window, int64_t max_rows, std::optional<int64_t> value_size,
            const std::optional<Tensor>& sinks) {
  constexpr nb::dlpack::dtype kBFloat16{static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1};
  check_key_cache(key_cache);
  check_value_cache(value_cache, key_cache);
  check_dims("query", query, 3);
  const int64_t num_heads = size(query, 1);
  const int64_t head_size = size(query, 2);
  const int64_t num_kv_heads = size(key_cache, 1);
  if (head_size != size(key_cache, 3) || num_heads % num_kv_heads != 0) {
    refuse("query of shape " + shape_text(query) + " does not fit key_cache of shape " + shape_text(key_cache));
  }
  const int64_t out_size = value_size.value_or(head_size);
  if (out_size < 0 || out_size > head_size) {
    refuse("value_size=" + std::to_string(out_size) + ", but a row of the cache has " + std::to_string(head_size) +
           " elements");
  }
  check_shape("out", out, {size(query, 0), num_heads, out_size});
  if (sinks) {
    check_shape("sinks", *sinks, {num_heads});
    check_type("sinks", *sinks, nb::dtype<float>(), "float32");
    check_contiguous("sinks", *sinks);
  }
  check_dims("block_table", block_table, 2);
  const int64_t num_chunks = size(block_table, 0);
  check_shape("row_starts", row_starts, {num_chunks + 1});
  check_shape("context_lens", context_lens, {num_chunks});

  if (query.dtype() != kBFloat16) check_type("query", query, nb::dtype<float>(), "float32 or bfloat16");
  check_type("key_cache", key_cache, query.dtype(), "query's");
  check_type("out", out, query.dtype(), "query's");
  check_type("block_table", block_table, nb::dtype<int32_t>(), "int32");
  check_type("row_starts", row_starts, nb::dtype<int32_t>(), "int32");
  check_type("context_lens", context_lens, nb::dtype<int32_t>(), "int32");

  check_contiguous("query", query);
  check_contiguous("out", out);
  check_contiguous("block_table", block_table);
  check_contiguous("row_starts", row_starts);
  check_contiguous("context_lens", context_lens);
  if (window && *window < 1) refuse("window=" + std::to_string(*window) + ", but it must be at least 1 or None");

  PagedAttention step{};
  step.type = query.dtype() == kBFloat16 ? ElementType::kBFloat16 : ElementType::kFloat32;
  step.query = query.data();
  step.key_cache = key_cache.data();
  step.value_cache = value_cache.data();
  step.block_table = numbers<int32_t>(block_table);
  step.row_starts = numbers<int32_t>(row_starts);
  step.context_lens = numbers<int32_t>(context_lens);
  step.sinks = sinks ? numbers<float>(*sinks) : nullptr;
  step.out = out.data();
  step.num_tokens = size(query, 0);
  step.num_chunks = num_chunks;
  step.num_heads = num_heads;
  step.num_kv_heads = num_kv_heads;
  step.head_size = head_size;
  step.value_size = out_size;
  step.num_blocks = size(key_cache, 0);
  step.block_size = size(key_cache, 2);
  step.max_blocks = size(block_table, 1);
  step.scale = static_cast<float>(scale);
  step.window = window.value_or(0);
  step.max_rows = max_rows;
  const nb::gil_scoped_release released;
  paged_attention(step);
}

void write(const Tensor& key, const std::optional<Tensor>& value, const Tensor& key_cache,
           const std::optional<Tensor>& value_cache, const Tensor& slots) {
  check_key_cache(key_cache);
  check_dims("slots", slots, 1);
  check_shape("key", key, {size(slots, 0), size(key_cache, 1), size(key_cache, 3)});
  check_type("key", key, key_cache.dtype(), "key_cache's");
  check_type("slots", slots, nb::dtype<int64_t>(), "int64");
  check_contiguous("key", key, 2);
  check_contiguous("slots", slots);

  CacheWrite step{};
  step.element_bytes = static_cast<int64_t>(key.itemsize());
  step.key = key.data();
  step.key_cache = key_cache.data();
  step.slots = numbers<int64_t>(slots);
  step.num_tokens = size(slots, 0);
  step.num_kv_heads = size(key_cache, 1);
  step.head_size = size(key_cache, 3);
  step.num_blocks = size(key_cache, 0);
  step.block_size = size(key_cache, 2);
  step.key_token_stride = key.stride(0);
  step.key_head_stride = key.stride(1);
  if (value.has_value() != value_cache.has_value()) refuse("value and value_cache go together: one of them is None");
  if (value) {
    check_value_cache(*value_cache, key_cache);
    check_shape("value", *value, {size(slots, 0), size(key_cache, 1), size(key_cache, 3)});
    check_type("value", *value, key_cache.dtype(), "key_cache's");
    check_contiguous("value", *value, 2);
    step.value = value->data();
    step.value_cache = value_cache->data();
    step.value_token_stride = value->stride(0);
    step.value_head_stride = value->stride(1);
  }
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
             "value_size"_a.none() = nb::none(), "sinks"_a.none() = nb::none(),
             "Writes to `out` the rows of chunks with at most `max_rows` rows.");
  module.def("write_cache", &moeserve::write, "key"_a, "value"_a.none(), "key_cache"_a, "value_cache"_a.none(),
             "slots"_a, "Stores each token's key, and value if there is one, at its slot; -1 is skipped.");

  module.def("set_num_threads", &moeserve::set_num_threads, "num_threads"_a, "Threads that kernels may use.");
  module.def("num_threads", &moeserve::num_threads);
  module.def("uses_openmp", &moeserve::uses_openmp, "Whether these are torch's OpenMP threads, or a pool of our own.");
  module.def(
      "isa", [] { return moeserve::isa_name(moeserve::current_isa()); }, "The instruction set that kernels run with.");
  module.def("usable_isas", &moeserve::usable_isa_names, "Those that this machine can run, best first.");
  module.def(
      "set_isa", [](const std::string& name) { moeserve::set_isa(moeserve::isa_of_name(name)); }, "name"_a,
      "Makes kernels run with one of `usable_isas()`; for tests and benchmarks.");
}
