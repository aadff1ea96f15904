// Packed weights as Python holds them, for the bindings of products.

#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "arguments.h"
#include "cpu/packed_product.h"
#include "cpu_graph.h"

namespace moeserve {

// Packed weights of one shape, with bias and activation. Keeps their tensors alive.
class PackedWeights {
 public:
  PackedWeights(const std::string& format, nanobind::object panels, int64_t num_outputs, int64_t num_inputs,
                nanobind::object bias, const std::string& activation, double alpha, double limit,
                std::optional<int64_t> chunk_inputs);

  // Compute output [R, columns]: the first counts[0] rows with the first weight, and so on. The rows are those of input
  // [R, K], or with indices [R] rows indices[r] / divisor of input [T, K]. With `has_spare_rows`, rows after those of
  // the last weight are allowed and stay unchanged.
  void multiply_rows(const Tensor& input, const Tensor& counts, bool has_spare_rows, const Tensor& output,
                     const std::optional<Tensor>& indices, int64_t divisor) const;

  // Compute output [R, columns] of input [R, K] with the only weight.
  void multiply(const Tensor& input, const Tensor& output) const;

  // Compute output [R, weights, columns]: input[:, i] with weight i.
  void multiply_each(const Tensor& input, const Tensor& output) const;

  int64_t num_weights() const { return panels_.size(0); }
  int64_t num_bytes() const { return panels_.num_elements(); }
  int64_t num_inputs() const { return product_.num_inputs; }
  int64_t num_columns() const { return num_columns_; }

  // The product of rows `input` [R, K] into `output` [R, columns].
  PackedProduct product_of(const Tensor& input, const Tensor& output) const;
  // The rows of one weight. `panels` are in the weights' own memory, or a copy of them.
  RowGroup group_of(int64_t weight, const char* input, char* output, int64_t num_rows) const;
  RowGroup group_of(int64_t weight, const char* panels, const char* input, char* output, int64_t num_rows) const;

 private:
  std::vector<RowGroup> groups_of_rows(const Tensor& input, const Tensor& counts, const Tensor& output,
                                       bool has_rows) const;

  template <typename Call>
  void run(const Call& call) const {
    if (CpuGraph* graph = capturing_cpu_graph()) graph->keep(nanobind::find(*this));
    run_kernel(call);
  }

  nanobind::object panels_owner_;
  nanobind::object bias_owner_;
  Tensor panels_;
  std::optional<Tensor> bias_;
  PackedProduct product_{};
  int64_t num_columns_;
};

// The address of a row.
inline char* row_of(const Tensor& tensor, int64_t row) {
  return static_cast<char*>(tensor.data) + row * tensor.strides[0] * element_bytes(tensor.type);
}

// Check the rows of each weight, counts [weights], of `num_rows` rows. With `has_spare_rows` others may follow.
void check_counts(const Tensor& counts, int64_t num_weights, int64_t num_rows, bool has_spare_rows);

// Check indices[r] / divisor, for the first `num_rows` of indices, against `num_sources`.
void check_indices(const int64_t* indices, int64_t num_rows, int64_t divisor, int64_t num_sources);

}  // namespace moeserve
