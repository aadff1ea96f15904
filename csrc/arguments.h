// Tensor arguments of the bindings: a view of their memory, and checks that raise ValueError.

#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "cpu/element_type.h"

namespace moeserve {

// A view of a Python tensor, which outlives the call.
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
// Requires contiguity from `first_dim` on. A dimension of size 1 may have any stride.
void check_contiguous(const char* name, const Tensor& tensor, int first_dim = 0);
void check_type(const char* name, const Tensor& tensor, ElementType expected, const char* expected_name);
// Checks shape, type and contiguity.
void check_array(const char* name, const Tensor& tensor, std::initializer_list<int64_t> shape, ElementType type,
                 const char* type_name);
// Requires bfloat16 or float32.
void check_float_type(const char* name, const Tensor& tensor);

template <typename Number>
const Number* numbers(const Tensor& tensor) {
  return static_cast<const Number*>(tensor.data);
}

// Fill `tensor` from a torch tensor. Return false for anything else, and for memory of another device. The attributes
// are read directly because a DLPack capsule costs ten times as much. A CPU graph that is being captured keeps the
// tensor alive.
bool read_tensor(nanobind::handle source, Tensor& tensor);

}  // namespace moeserve

namespace nanobind::detail {

template <>
struct type_caster<moeserve::Tensor> {
  NB_TYPE_CASTER(moeserve::Tensor, const_name("torch.Tensor"))

  bool from_python(handle source, uint8_t, cleanup_list*) noexcept { return moeserve::read_tensor(source, value); }
};

}  // namespace nanobind::detail
