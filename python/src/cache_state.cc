// The state of a cache in Python's terms.
#include <algorithm>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <type_traits>

#include "python_cache.h"

namespace morphkv::python {
namespace {

std::unique_ptr<std::uint16_t[]> copy_of(const std::vector<std::uint16_t>& values) {
  auto copy = std::make_unique_for_overwrite<std::uint16_t[]>(values.size());
  std::copy(values.begin(), values.end(), copy.get());
  return copy;
}

nb::object entry(const nb::dict& state, const char* key) {
  if (!state.contains(key)) {
    throw std::invalid_argument(std::string("the state lacks '") + key + "'");
  }
  return state[key];
}

template <typename T>
T value(nb::handle object, const char* name) {
  T out{};
  if (!nb::try_cast(object, out)) {
    const std::string text =
        std::string("the state's ") + name + " is of the wrong type: " + nb::repr(object).c_str();
    throw nb::type_error(text.c_str());
  }
  return out;
}

// Any array of 2-byte floats [batch, head, row, dim], as one block.
std::vector<std::uint16_t> halves(nb::handle array, const char* name, ArrayView& view) {
  const InputArray in = read_array(array, name);
  view = in.view;
  if (size_of(view.dtype) != 2) {
    throw std::invalid_argument(std::string("the state's ") + name +
                                " must be float16 or bfloat16");
  }
  std::vector<std::uint16_t> out;
  const auto& [batch, heads, rows, dim] = view.shape;
  out.reserve(static_cast<std::size_t>(batch * heads * rows * dim));
  for (std::int64_t row = 0; row < batch * heads * rows; ++row) {
    const std::byte* at = view.data + row / (heads * rows) * view.strides[0] +
                          row / rows % heads * view.strides[1] + row % rows * view.strides[2];
    for (std::int64_t d = 0; d < dim; ++d) {
      std::uint16_t bits;
      std::memcpy(&bits, at + d * view.strides[3], sizeof bits);
      out.push_back(bits);
    }
  }
  return out;
}

// `array` as numpy reads it, flat.
template <typename T>
std::vector<T> numbers(nb::handle array, const char* numpy_type) {
  const nb::object np = nb::module_::import_("numpy");
  const nb::object flat =
      np.attr("ascontiguousarray")(np.attr("asarray")(array), numpy_type).attr("reshape")(-1);
  const auto values = nb::cast<nb::ndarray<const T, nb::ndim<1>, nb::c_contig>>(flat);
  return {values.data(), values.data() + values.size()};
}

template <typename T>
nb::bytes bytes(const std::vector<T>& values) {
  return nb::bytes(values.data(), values.size() * sizeof(T));
}

template <typename T>
std::vector<T> values_of(nb::handle object) {
  const auto data = nb::cast<nb::bytes>(object);
  std::vector<T> values(data.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), data.data(), values.size() * sizeof(T));
  return values;
}

}  // namespace

nb::dict to_dict(CacheState s, const ArrayKind& kind) {
  nb::dict state;
  const bool empty = s.batch * s.heads == 0;
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  const std::vector<std::size_t> shape{size(s.batch), size(s.heads), size(s.rows()), size(s.dim)};
  state["keys"] = empty ? nb::none() : kind.halves(copy_of(s.keys), shape, s.dtype);
  state["values"] = empty ? nb::none() : kind.halves(copy_of(s.values), shape, s.dtype);
  state["positions"] =
      numpy_int64({s.positions.begin(), s.positions.end()}, {shape[0], shape[1], shape[2]});
  state["offset"] = s.offset;
  state["saturated"] = s.saturated;
  state["config"] = s.config;
  nb::list memory;
  for (auto& floats : s.memory) memory.append(numpy_float32(std::move(floats)));
  state["memory"] = memory;
  return state;
}

CacheState from_dict(nb::handle object) {
  const auto dict = value<nb::dict>(object, "container");
  CacheState s;
  s.config = value<CacheConfig>(entry(dict, "config"), "config");
  s.offset = value<Position>(entry(dict, "offset"), "offset");
  s.saturated = value<std::int64_t>(entry(dict, "saturated"), "saturated");
  const nb::object keys = entry(dict, "keys");
  const nb::object values = entry(dict, "values");
  if (!keys.is_none()) {
    ArrayView k, v;
    s.keys = halves(keys, "keys", k);
    s.values = halves(values, "values", v);
    if (k.shape != v.shape || k.dtype != v.dtype) {
      throw std::invalid_argument("the state's keys and values differ in shape or type");
    }
    s.batch = k.shape[0];
    s.heads = k.shape[1];
    s.dim = k.shape[3];
    s.dtype = k.dtype;
  }
  const auto positions = numbers<std::int64_t>(entry(dict, "positions"), "int64");
  s.positions.assign(positions.begin(), positions.end());
  for (const nb::handle floats : value<nb::list>(entry(dict, "memory"), "memory")) {
    s.memory.push_back(numbers<float>(floats, "float32"));
  }
  return s;
}

nb::tuple to_bytes(const CacheState& s) {
  nb::list memory;
  for (const auto& floats : s.memory) memory.append(bytes(floats));
  return nb::make_tuple(s.batch, s.heads, s.dim, s.dtype == DType::kBF16, s.offset, s.saturated,
                        bytes(s.positions), bytes(s.keys), bytes(s.values), memory);
}

CacheState from_bytes(const CacheConfig& config, const nb::tuple& t) {
  if (t.size() != 10) throw std::invalid_argument("this is no pickled MorphKVCache");
  CacheState s;
  s.config = config;
  s.batch = nb::cast<std::int64_t>(t[0]);
  s.heads = nb::cast<std::int64_t>(t[1]);
  s.dim = nb::cast<std::int64_t>(t[2]);
  s.dtype = nb::cast<bool>(t[3]) ? DType::kBF16 : DType::kF16;
  s.offset = nb::cast<Position>(t[4]);
  s.saturated = nb::cast<std::int64_t>(t[5]);
  s.positions = values_of<Position>(t[6]);
  s.keys = values_of<std::uint16_t>(t[7]);
  s.values = values_of<std::uint16_t>(t[8]);
  for (const nb::handle floats : nb::cast<nb::list>(t[9])) {
    s.memory.push_back(values_of<float>(floats));
  }
  return s;
}

}  // namespace morphkv::python
