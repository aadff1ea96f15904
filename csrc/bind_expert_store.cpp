// Bindings of the store of experts on disk, and of the experts' products with the experts that it reads.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "cpu/rows.h"
#include "host/expert_store.h"
#include "packed_weights.h"

namespace nb = nanobind;

namespace moeserve {

namespace {

using PartTuple = std::tuple<int64_t, int64_t, uint64_t>;  // offset, bytes, checksum

void add_layer(ExpertStore& store, const std::vector<PartTuple>& gate_up, const std::vector<PartTuple>& down,
               int num_slots) {
  if (gate_up.empty() || gate_up.size() != down.size()) refuse("gate_up and down need the same number of experts");
  if (num_slots < 1) refuse("num_slots=" + std::to_string(num_slots) + ", but it must be at least 1");
  std::vector<StoredExpert> experts;
  const auto part_of = [](const PartTuple& part) {
    return StoredPart{std::get<0>(part), std::get<1>(part), std::get<2>(part)};
  };
  for (size_t e = 0; e < gate_up.size(); ++e) experts.push_back({part_of(gate_up[e]), part_of(down[e])});
  store.add_layer(std::move(experts), num_slots);
}

void fill_with_nan(const Tensor& output, int64_t first_row, int64_t num_rows) {
  for (int64_t r = first_row; r < first_row + num_rows; ++r) {
    std::memset(row_of(output, r), 0xFF, output.size(1) * element_bytes(output.type));  // NaN in both types
  }
}

// Compute output [R, columns of down] = down(gate_up(row)) for the rows of each expert of a layer: see
// `PackedWeights::multiply_rows`. `middle` [R, columns of gate_up] is overwritten, and with `indices` so is `gathered`
// [R, K], the rows in the order of the experts. The weights of both are those of the store's layer; their own memory is
// not read. Rows of an expert that cannot be read become NaN.
void multiply(ExpertStore& store, int layer, const PackedWeights& gate_up, const PackedWeights& down,
              const Tensor& input, const Tensor& counts, bool has_spare_rows, const Tensor& middle,
              const Tensor& output, const std::optional<Tensor>& indices, const std::optional<Tensor>& gathered,
              int64_t divisor) {
  check_dims("input", input, 2);
  check_shape("input", input, {input.size(0), gate_up.num_inputs()});
  const int64_t num_rows = indices ? indices->size(0) : input.size(0);
  const int64_t num_weights = gate_up.num_weights();
  check_shape("middle", middle, {num_rows, gate_up.num_columns()});
  check_shape("output", output, {num_rows, down.num_columns()});
  check_array("counts", counts, {num_weights}, ElementType::kInt64, "int64");
  if (indices.has_value() != gathered.has_value()) refuse("indices and gathered need each other");
  if (indices) {
    check_array("indices", *indices, {num_rows}, ElementType::kInt64, "int64");
    check_shape("gathered", *gathered, {num_rows, input.size(1)});
    check_contiguous("gathered", *gathered);
    if (gathered->type != input.type) refuse("gathered and input differ in type");
  }
  if (divisor < 1) refuse("divisor=" + std::to_string(divisor) + ", but it must be at least 1");
  if (down.num_weights() != num_weights || down.num_inputs() != gate_up.num_columns()) refuse("down does not fit");
  PackedProduct first = gate_up.product_of(input, middle);
  const PackedProduct second = down.product_of(middle, output);
  if (CpuGraph* graph = capturing_cpu_graph()) {
    for (const nb::handle owner : {nb::find(store), nb::find(gate_up), nb::find(down)}) graph->keep(owner);
  }
  if (indices) first.input_stride = input.size(1);  // rows are gathered
  run_kernel([=, &store, &gate_up, &down] {
    check_counts(counts, num_weights, num_rows, has_spare_rows);
    std::vector<int> experts;
    std::vector<int64_t> first_rows, sizes;
    int64_t total = 0;
    for (int64_t e = 0; e < num_weights; ++e) {
      const int64_t count = numbers<int64_t>(counts)[e];
      if (count == 0) continue;
      experts.push_back(static_cast<int>(e));
      first_rows.push_back(total);
      sizes.push_back(count);
      total += count;
    }
    const char* rows = static_cast<const char*>(input.data);
    if (indices) {
      const auto* sources = numbers<int64_t>(*indices);
      check_indices(sources, total, divisor, input.size(0));
      const int64_t row_bytes = input.size(1) * element_bytes(input.type);
      for (int64_t r = 0; r < total; ++r) {
        std::memcpy(row_of(*gathered, r), row_of(input, sources[r] / divisor), row_bytes);
      }
      rows = static_cast<const char*>(gathered->data);
    }
    store.visit(layer, experts, [&](const std::vector<ExpertStore::Ready>& ready) {
      std::vector<RowGroup> first_groups, second_groups;
      for (const ExpertStore::Ready& each : ready) {
        const int64_t row = first_rows[each.index], size = sizes[each.index];
        if (each.parts[0] == nullptr) {
          fill_with_nan(output, row, size);
          continue;
        }
        const char* own = rows + row * first.input_stride * element_bytes(input.type);
        const int64_t expert = experts[each.index];
        first_groups.push_back(gate_up.group_of(expert, each.parts[0], own, row_of(middle, row), size));
        second_groups.push_back(down.group_of(expert, each.parts[1], row_of(middle, row), row_of(output, row), size));
      }
      packed_product(first, first_groups);
      packed_product(second, second_groups);
    });
  });
}

using CounterTuple = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;

std::vector<CounterTuple> counters(ExpertStore& store) {
  std::vector<CounterTuple> all;
  for (const ExpertStore::Counters& each : store.counters()) {
    all.emplace_back(each.num_hits, each.num_misses, each.num_bytes, each.wait_ns, each.num_released);
  }
  return all;
}

std::vector<uint64_t> checksums(const Tensor& rows) {
  check_dims("rows", rows, 2);
  check_type("rows", rows, ElementType::kUInt8, "uint8");
  check_contiguous("rows", rows);
  std::vector<uint64_t> sums(rows.size(0));
  const nb::gil_scoped_release released;
  for (int64_t r = 0; r < rows.size(0); ++r) sums[r] = checksum(row_of(rows, r), rows.size(1));
  return sums;
}

}  // namespace

void bind_expert_store(nb::module_& module) {
  using namespace nb::literals;
  module.def("checksums", &checksums, "rows"_a, "Return a checksum of each row of bytes [rows, bytes].");
  nb::class_<ExpertStore>(module, "ExpertStore", "Experts in a file, which are read into slots in memory.")
      .def(
          "__init__",
          [](ExpertStore* store, const std::string& path, int num_readers) {
            try {
              new (store) ExpertStore(path, num_readers);
            } catch (const std::system_error& error) {
              PyErr_SetObject(PyExc_OSError, nb::make_tuple(error.code().value(), error.what()).ptr());
              throw nb::python_error();
            }
          },
          "path"_a, "num_readers"_a)
      .def("add_layer", &add_layer, "gate_up"_a, "down"_a, "num_slots"_a,
           "Add the next layer: offset, bytes and checksum of each expert's weights, and the number of its slots.")
      .def("multiply", &multiply, "layer"_a, "gate_up"_a, "down"_a, "input"_a, "counts"_a, "has_spare_rows"_a,
           "middle"_a, "output"_a, "indices"_a.none() = nb::none(), "gathered"_a.none() = nb::none(), "divisor"_a = 1,
           "Compute output = down(gate_up(row)) of each expert's rows, as PackedWeights.multiply_rows does. The "
           "outputs of an expert that cannot be read are NaN.")
      .def("record", &ExpertStore::record, "is_on"_a,
           "Record the experts of the following visits. Return those recorded before: layer, number, experts, ...")
      .def("counters", &counters,
           "Return for each layer the experts found in memory, those that were not, bytes read, nanoseconds waited, "
           "and bytes of slots given back.")
      .def("shrink", &ExpertStore::shrink, "least_slots"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Keep half of the slots of each layer, but at least this number.")
      .def_prop_ro("num_slots", &ExpertStore::num_slots, "Slots of each layer.")
      .def("take_errors", &ExpertStore::take_errors, "Return what could not be read since the last call.")
      .def_prop_ro("is_direct", &ExpertStore::is_direct, "False if reads go through the page cache.")
      .def_prop_ro("num_slot_bytes", &ExpertStore::num_slot_bytes, "Memory of all slots.");
}

}  // namespace moeserve
