// Reads tensors from Python objects and reports mismatched arguments.

#include "arguments.h"

#include <algorithm>
#include <stdexcept>

#include "cpu_graph.h"

namespace nb = nanobind;

namespace moeserve {

namespace {

// Torch objects and attribute names, looked up once and never released. The module does not link against torch.
struct TorchNames {
  PyTypeObject* tensor;
  std::array<std::pair<PyObject*, ElementType>, 8> dtypes;
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* stride = PyUnicode_InternFromString("stride");

  explicit TorchNames(nb::handle torch) {
    const auto attribute = [&](const char* name) { return nb::getattr(torch, name).release().ptr(); };
    tensor = reinterpret_cast<PyTypeObject*>(attribute("Tensor"));
    dtypes = {{{attribute("bfloat16"), ElementType::kBFloat16},
               {attribute("float32"), ElementType::kFloat32},
               {attribute("float16"), ElementType::kFloat16},
               {attribute("float64"), ElementType::kFloat64},
               {attribute("int64"), ElementType::kInt64},
               {attribute("int32"), ElementType::kInt32},
               {attribute("int8"), ElementType::kInt8},
               {attribute("uint8"), ElementType::kUInt8}}};
  }
};

// Return null if torch has not been imported.
const TorchNames* torch_names() {
  static const TorchNames* names = nullptr;  // guarded by the GIL
  if (names == nullptr) {
    PyObject* modules = PySys_GetObject("modules");
    PyObject* torch = modules == nullptr ? nullptr : PyDict_GetItemString(modules, "torch");
    if (torch == nullptr || !nb::hasattr(torch, "Tensor") || !nb::hasattr(torch, "uint8")) return nullptr;
    names = new TorchNames(torch);
  }
  return names;
}

bool read_integers(PyObject* tuple, std::array<int64_t, Tensor::kMaxDims>& integers, int& count) {
  if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) > Tensor::kMaxDims) return false;
  count = static_cast<int>(PyTuple_Size(tuple));
  for (int i = 0; i < count; ++i) integers[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
  return !PyErr_Occurred();
}

bool read_torch(const TorchNames& torch, PyObject* source, Tensor& tensor) {
  const auto get = [&](PyObject* name) { return nb::steal(PyObject_GetAttr(source, name)); };
  const auto call = [&](PyObject* name) { return nb::steal(PyObject_VectorcallMethod(name, &source, 1, nullptr)); };
  if (get(torch.is_cpu).ptr() != Py_True) return false;
  const nb::object dtype = get(torch.dtype), shape = get(torch.shape), stride = call(torch.stride);
  const nb::object address = call(torch.data_ptr);
  if (!dtype.is_valid() || !shape.is_valid() || !stride.is_valid() || !address.is_valid()) return false;
  const auto known = std::find_if(torch.dtypes.begin(), torch.dtypes.end(),
                                  [&](const auto& entry) { return entry.first == dtype.ptr(); });
  tensor.type = known == torch.dtypes.end() ? ElementType::kOther : known->second;
  tensor.data = PyLong_AsVoidPtr(address.ptr());
  return read_integers(shape.ptr(), tensor.sizes, tensor.num_dims) &&
         read_integers(stride.ptr(), tensor.strides, tensor.num_dims);
}

}  // namespace

bool read_tensor(nb::handle source, Tensor& tensor) {
  const TorchNames* torch = torch_names();
  if (torch == nullptr || !PyObject_TypeCheck(source.ptr(), torch->tensor)) return false;
  const bool is_read = read_torch(*torch, source.ptr(), tensor);
  if (!is_read) PyErr_Clear();
  if (CpuGraph* graph = capturing_cpu_graph(); is_read && graph != nullptr) graph->keep(source, tensor.data);
  return is_read;
}

int64_t Tensor::num_elements() const {
  int64_t product = 1;
  for (int i = 0; i < num_dims; ++i) product *= sizes[i];
  return product;
}

void refuse(const std::string& message) { throw std::invalid_argument(message); }

std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (int i = 0; i < tensor.num_dims; ++i) text += (i > 0 ? ", " : "") + std::to_string(tensor.size(i));
  return text + "]";
}

void check_dims(const char* name, const Tensor& tensor, int num_dims) {
  if (tensor.num_dims == num_dims) return;
  refuse(std::string(name) + " has shape " + shape_text(tensor) + ", expected " + std::to_string(num_dims) +
         " dimensions");
}

void check_shape(const char* name, const Tensor& tensor, std::initializer_list<int64_t> expected) {
  bool equal = tensor.num_dims == static_cast<int>(expected.size());
  for (int i = 0; equal && i < tensor.num_dims; ++i) equal = tensor.size(i) == expected.begin()[i];
  if (equal) return;
  std::string text;
  for (int64_t size : expected) text += (text.empty() ? "" : ", ") + std::to_string(size);
  refuse(std::string(name) + " has shape " + shape_text(tensor) + ", expected [" + text + "]");
}

void check_contiguous(const char* name, const Tensor& tensor, int first_dim) {
  if (tensor.num_elements() == 0) return;
  int64_t expected = 1;
  for (int i = tensor.num_dims; i-- > first_dim;) {
    if (tensor.size(i) > 1 && tensor.strides[i] != expected) refuse(std::string(name) + " is not contiguous");
    expected *= tensor.size(i);
  }
}

void check_type(const char* name, const Tensor& tensor, ElementType expected, const char* expected_name) {
  if (tensor.type != expected) refuse(std::string(name) + " is not of type " + expected_name);
}

void check_array(const char* name, const Tensor& tensor, std::initializer_list<int64_t> shape, ElementType type,
                 const char* type_name) {
  check_shape(name, tensor, shape);
  check_type(name, tensor, type, type_name);
  check_contiguous(name, tensor);
}

void check_float_type(const char* name, const Tensor& tensor) {
  if (tensor.type != ElementType::kBFloat16) check_type(name, tensor, ElementType::kFloat32, "float32 or bfloat16");
}

}  // namespace moeserve
