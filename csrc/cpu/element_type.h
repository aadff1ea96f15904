// The types of numbers that tensors hold. Knows no Python.

#pragma once

namespace moeserve {

enum class ElementType { kFloat32, kBFloat16, kFloat16, kInt32, kInt64, kInt8, kUInt8, kOther };

}  // namespace moeserve
