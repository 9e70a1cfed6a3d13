#include "arrays.h"

#include <stdexcept>
#include <utility>

namespace morphkv::python {
namespace {

constexpr auto kFloat = static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float);
constexpr auto kBfloat = static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat);

nb::object numpy() { return nb::module_::import_("numpy"); }

std::string text_of(nb::handle object) { return nb::str(object).c_str(); }

std::string module_of(nb::handle array) {
  return text_of(nb::getattr(array.type(), "__module__", nb::str("")));
}

bool is_numpy(nb::handle array) { return nb::isinstance(array, numpy().attr("ndarray")); }

[[noreturn]] void refuse_type(nb::handle array, const char* name) {
  const nb::object dtype = nb::getattr(array, "dtype", array.type().attr("__name__"));
  const std::string text = std::string(name) + " are " + text_of(dtype) +
                           ": give an array of float16, bfloat16, float32 or float64 in host "
                           "memory (DLPack or the buffer protocol)";
  throw nb::type_error(text.c_str());
}

// numpy exports no bfloat16 (package ml_dtypes): its bits stand in.
nb::object exportable(nb::handle array, bool& is_bfloat) {
  is_bfloat = is_numpy(array) && text_of(array.attr("dtype").attr("name")) == "bfloat16";
  return is_bfloat ? array.attr("view")("uint16") : nb::borrow(array);
}

// numpy does not export strides that are no multiple of the element, nor a foreign byte order.
nb::object native_copy(nb::handle array, bool is_bfloat) {
  const nb::object dtype = array.attr("dtype");
  if (!is_bfloat && text_of(dtype.attr("kind")) != "f") return nb::none();
  return numpy().attr("array")(array, dtype.attr("newbyteorder")("="));
}

DType dtype_of(const nb::ndarray<nb::ro>& array, bool is_bfloat, nb::handle source,
               const char* name) {
  const nb::dlpack::dtype dtype = array.dtype();
  if (is_bfloat) return DType::kBF16;
  if (dtype.lanes == 1 && dtype.code == kBfloat && dtype.bits == 16) return DType::kBF16;
  if (dtype.lanes == 1 && dtype.code == kFloat) {
    if (dtype.bits == 16) return DType::kF16;
    if (dtype.bits == 32) return DType::kF32;
    if (dtype.bits == 64) return DType::kF64;
  }
  refuse_type(source, name);
}

std::string shape_text(const nb::ndarray<nb::ro>& array) {
  std::string text = "[";
  for (std::size_t i = 0; i < array.ndim(); ++i)
    text += (i > 0 ? ", " : "") + std::to_string(array.shape(i));
  return text + "]";
}

template <typename T>
nb::capsule owner_of(std::unique_ptr<T[]> data) {
  nb::capsule owner(data.get(), [](void* p) noexcept { delete[] static_cast<T*>(p); });
  static_cast<void>(data.release());  // the capsule's now
  return owner;
}

template <typename T>
nb::capsule owner_of(std::vector<T>& data) {
  auto kept = std::make_unique<std::vector<T>>(std::move(data));
  nb::capsule owner(kept.get(), [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  data = {};
  static_cast<void>(kept.release());
  return owner;
}

template <typename Framework>
nb::object owned(void* data, const std::vector<std::size_t>& shape, nb::handle owner,
                 nb::dlpack::dtype dtype) {
  return nb::cast(nb::ndarray<Framework>(data, shape.size(), shape.data(), owner, nullptr, dtype));
}

template <typename T>
nb::object owned_numpy(std::vector<T> values, const std::vector<std::size_t>& shape) {
  T* const data = values.data();
  return owned<nb::numpy>(data, shape, owner_of(values), nb::dtype<T>());
}

}  // namespace

InputArray read_array(nb::handle array, const char* name) {
  bool is_bfloat = false;
  const nb::object source = exportable(array, is_bfloat);
  InputArray in;
  const bool exported =
      nb::try_cast(source, in.keep_alive) ||
      (is_numpy(source) && nb::try_cast(native_copy(source, is_bfloat), in.keep_alive));
  if (!exported || in.keep_alive.device_type() != nb::device::cpu::value) refuse_type(array, name);
  const auto& a = in.keep_alive;
  in.view.dtype = dtype_of(a, is_bfloat, array, name);
  if (a.ndim() != 4) {
    throw std::invalid_argument(std::string(name) + " " + shape_text(a) + " have " +
                                std::to_string(a.ndim()) + " axes: give the 4 of [B, H, S, D]");
  }
  in.view.data = static_cast<const std::byte*>(a.data());
  for (std::size_t i = 0; i < 4; ++i) {
    in.view.shape[i] = static_cast<std::int64_t>(a.shape(i));
    in.view.strides[i] = a.stride(i) * static_cast<std::int64_t>(size_of(in.view.dtype));
  }
  return in;
}

ArrayKind::ArrayKind(const std::string& module) : module_(module) {
  if (!module_.empty()) {
    from_dlpack_ = nb::module_::import_(module_.c_str()).attr("from_dlpack");
  }
}

ArrayKind ArrayKind::of(nb::handle array) {
  if (is_numpy(array) || !nb::hasattr(array, "__dlpack__")) return {};
  const std::string module = module_of(array);
  if (module == "mlx.core") return ArrayKind(module);
  if (module == "torch" || module.starts_with("torch.")) return ArrayKind("torch");
  if (nb::hasattr(array, "__array_namespace__")) {
    return ArrayKind(text_of(array.attr("__array_namespace__")().attr("__name__")));
  }
  return {};
}

nb::object ArrayKind::import(nb::handle exporter) const { return from_dlpack_(exporter); }

nb::object ArrayKind::halves(std::unique_ptr<std::uint16_t[]> data,
                             const std::vector<std::size_t>& shape, DType dtype) const {
  void* const address = data.get();
  const bool bf16 = dtype == DType::kBF16;
  if (!module_.empty()) {
    return import(owned<nb::array_api>(address, shape, owner_of(std::move(data)),
                                       {bf16 ? kBfloat : kFloat, 16, 1}));
  }
  if (!bf16) {
    return owned<nb::numpy>(address, shape, owner_of(std::move(data)), {kFloat, 16, 1});
  }
  const nb::object bits = numpy_uint16(std::move(data), shape);
  return bits.attr("view")(nb::module_::import_("ml_dtypes").attr("bfloat16"));
}

nb::object ArrayKind::bools(std::vector<std::uint8_t> data,
                            const std::vector<std::size_t>& shape) const {
  void* const address = data.data();
  const nb::capsule owner = owner_of(data);
  if (!module_.empty())
    return import(owned<nb::array_api>(address, shape, owner, nb::dtype<bool>()));
  return owned<nb::numpy>(address, shape, owner, nb::dtype<bool>());
}

nb::object numpy_int64(std::vector<std::int64_t> data, const std::vector<std::size_t>& shape) {
  return owned_numpy(std::move(data), shape);
}

nb::object numpy_float32(std::vector<float> data) {
  const std::vector<std::size_t> shape{data.size()};
  return owned_numpy(std::move(data), shape);
}

nb::object numpy_uint16(std::unique_ptr<std::uint16_t[]> data,
                        const std::vector<std::size_t>& shape) {
  void* const address = data.get();
  return owned<nb::numpy>(address, shape, owner_of(std::move(data)), nb::dtype<std::uint16_t>());
}

}  // namespace morphkv::python
