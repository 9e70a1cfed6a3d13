// Python's arrays on both sides of the cache: views of what comes in (DLPack or the buffer
// protocol), and new arrays of the caller's kind for what goes out. Knows nothing of caches.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "morphkv/tensor_view.h"

namespace morphkv::python {

namespace nb = nanobind;

// An array of Python's that is kept alive while C++ reads it.
struct InputArray {
  ArrayView view;  // [batch, head, token, dim]
  nb::ndarray<nb::ro> keep_alive;
};

// Throws nb::type_error for what is no array, lies on a device or holds no floats, and
// std::invalid_argument for another number of axes than 4. `name` begins the message.
InputArray read_array(nb::handle array, const char* name);

// The library whose arrays are handed out.
class ArrayKind {
 public:
  ArrayKind() = default;  // numpy
  // Of a module that has from_dlpack(), "" for numpy.
  explicit ArrayKind(const std::string& module);
  // The kind of an array; numpy for an object that only has the buffer protocol.
  static ArrayKind of(nb::handle array);

  const std::string& module() const { return module_; }
  // An array [shape] over `data`, which it owns.
  nb::object halves(std::unique_ptr<std::uint16_t[]> data, const std::vector<std::size_t>& shape,
                    DType dtype) const;
  nb::object bools(std::vector<std::uint8_t> data, const std::vector<std::size_t>& shape) const;

 private:
  nb::object import(nb::handle exporter) const;

  std::string module_;  // "" = numpy
  nb::object from_dlpack_;
};

// numpy arrays [shape] that own `data`.
nb::object numpy_int64(std::vector<std::int64_t> data, const std::vector<std::size_t>& shape);
nb::object numpy_float32(std::vector<float> data);
nb::object numpy_uint16(std::unique_ptr<std::uint16_t[]> data,
                        const std::vector<std::size_t>& shape);

}  // namespace morphkv::python
