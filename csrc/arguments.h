// What kernels take from Python: the memory of tensors, checked. Knows no kernel.
//
// A wrong argument raises ValueError.

#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "cpu/element_type.h"

namespace moeserve {

// Memory that belongs to a tensor of Python's, which is alive for as long as the call.
struct Tensor {
  static constexpr int kMaxDims = 5;

  void* data = nullptr;
  ElementType type = ElementType::kOther;
  int num_dims = 0;
  std::array<int64_t, kMaxDims> sizes{};
  std::array<int64_t, kMaxDims> strides{};  // in elements

  int64_t size(int dim) const { return sizes[dim]; }
  int64_t num_elements() const;
};

[[noreturn]] void refuse(const std::string& message);
std::string shape_text(const Tensor& tensor);
void check_dims(const char* name, const Tensor& tensor, int num_dims);
void check_shape(const char* name, const Tensor& tensor, std::initializer_list<int64_t> expected);
// Contiguous from `first_dim` on. A dimension of size 1 may have any stride.
void check_contiguous(const char* name, const Tensor& tensor, int first_dim = 0);
void check_type(const char* name, const Tensor& tensor, ElementType expected, const char* expected_name);
// bfloat16 or float32
void check_float_type(const char* name, const Tensor& tensor);

template <typename Number>
const Number* numbers(const Tensor& tensor) {
  return static_cast<const Number*>(tensor.data);
}

// Fills `tensor` from a torch tensor, or from anything else that speaks DLPack; false if it is neither, or not in the
// memory of the CPU. Torch's attributes are read directly: a DLPack capsule costs ten times as much. While a graph is
// recorded, it keeps what was read.
bool read_tensor(nanobind::handle source, Tensor& tensor);

}  // namespace moeserve

namespace nanobind::detail {

template <>
struct type_caster<moeserve::Tensor> {
  NB_TYPE_CASTER(moeserve::Tensor, const_name("torch.Tensor"))

  bool from_python(handle source, uint8_t, cleanup_list*) noexcept { return moeserve::read_tensor(source, value); }
};

}  // namespace nanobind::detail
