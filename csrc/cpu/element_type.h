// The element types of tensors, and rows of heads that may be views of wider rows.

#pragma once

#include <cstdint>
#include <stdexcept>

namespace moeserve {

enum class ElementType { kFloat64, kFloat32, kBFloat16, kFloat16, kInt32, kInt64, kInt8, kUInt8, kOther };

// Return the size of an element. Throws std::invalid_argument for an unsupported type.
inline int64_t element_bytes(ElementType type) {
  switch (type) {
    case ElementType::kFloat64:
    case ElementType::kInt64:
      return 8;
    case ElementType::kFloat32:
    case ElementType::kInt32:
      return 4;
    case ElementType::kBFloat16:
    case ElementType::kFloat16:
      return 2;
    case ElementType::kInt8:
    case ElementType::kUInt8:
      return 1;
    case ElementType::kOther:
      break;
  }
  throw std::invalid_argument("unsupported element type of a tensor");
}

// Rows [tokens, heads, width] with contiguous elements. Strides are in elements.
struct HeadRows {
  void* data;
  int64_t token_stride;
  int64_t head_stride;
};

}  // namespace moeserve
