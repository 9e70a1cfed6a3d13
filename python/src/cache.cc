// MorphKVCache and CacheBuilder. Method names and contracts: include/morphkv/cache.h.
#include "morphkv/cache.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/typing.h>

#include <filesystem>
#include <limits>
#include <stdexcept>

#include "bindings.h"
#include "morphkv/builder.h"
#include "python_cache.h"

namespace morphkv::python {
namespace {

using namespace nb::literals;
using Halves = std::unique_ptr<std::uint16_t[]>;
using Class = nb::class_<PythonCache>;

// Rows of the cache in memory of their own.
struct CopiedRows {
  Halves data;
  std::vector<std::size_t> shape;
  DType dtype;

  explicit CopiedRows(const Rows& rows)
      : shape{static_cast<std::size_t>(rows.batch), static_cast<std::size_t>(rows.heads),
              static_cast<std::size_t>(rows.rows), static_cast<std::size_t>(rows.dim)},
        dtype(rows.dtype) {
    data =
        std::make_unique_for_overwrite<std::uint16_t[]>(shape[0] * shape[1] * shape[2] * shape[3]);
    rows.copy_to(data.get());
  }
  nb::object to(const ArrayKind& kind) && { return kind.halves(std::move(data), shape, dtype); }
};

using Fetch = KeysAndValues (MorphKVCache::*)(const ArrayView&, const ArrayView&);
using FetchAsked = KeysAndValues (MorphKVCache::*)(const ArrayView&, const ArrayView&,
                                                   const ArrayView&);

// A call that brings rows and returns rows, without and with queries.
template <Fetch plain, FetchAsked asked>
nb::tuple fetch(PythonCache& self, nb::handle keys, nb::handle values, nb::handle queries) {
  const InputArray k = read_array(keys, "keys");
  const InputArray v = read_array(values, "values");
  std::optional<InputArray> q;
  if (!queries.is_none()) q = read_array(queries, "queries");
  auto [key_rows, value_rows] = self.locked([&](MorphKVCache& cache) {
    const KeysAndValues rows =
        q ? (cache.*asked)(k.view, v.view, q->view) : (cache.*plain)(k.view, v.view);
    std::pair out{CopiedRows(rows.keys), CopiedRows(rows.values)};
    static_cast<void>(cache.keys());  // evicts now, so that memory at rest is the budget's
    return out;
  });
  self.kind = ArrayKind::of(keys);
  return nb::make_tuple(std::move(key_rows).to(self.kind), std::move(value_rows).to(self.kind));
}

nb::object stored_rows(PythonCache& self, bool of_values) {
  auto rows = self.locked([&](MorphKVCache& cache) -> std::optional<CopiedRows> {
    const Rows held = of_values ? cache.values() : cache.keys();
    if (held.blocks.empty()) return std::nullopt;
    return CopiedRows(held);
  });
  return rows ? std::move(*rows).to(self.kind) : nb::none();
}

struct Shape {
  std::size_t batch, heads, rows;
};

// cache.state() would copy all rows.
Shape shape_of(MorphKVCache& cache) {
  const Rows keys = cache.keys();
  return {static_cast<std::size_t>(keys.batch), static_cast<std::size_t>(keys.heads),
          static_cast<std::size_t>(keys.rows)};
}

nb::object positions(PythonCache& self) {
  auto [shape, out] = self.locked([](MorphKVCache& cache) {
    const auto held = cache.positions();
    return std::pair{shape_of(cache), std::vector<std::int64_t>(held.begin(), held.end())};
  });
  return numpy_int64(std::move(out), {shape.batch, shape.heads, shape.rows});
}

nb::object make_mask(PythonCache& self, std::int64_t n, std::optional<std::int64_t> window_size) {
  auto [shape, mask] = self.locked([&](MorphKVCache& cache) {
    return std::pair{shape_of(cache), cache.make_mask(n, window_size)};
  });
  if (!mask) return nb::none();
  const auto queries = static_cast<std::size_t>(mask->queries);
  const auto rows = static_cast<std::size_t>(mask->rows);
  const bool per_head = window_size && shape.heads > 0;
  return self.kind.bools(
      std::move(mask->allowed),
      per_head ? std::vector{shape.batch, shape.heads, queries, rows} : std::vector{queries, rows});
}

// A new object of self's own class; attributes that a subclass added come along.
nb::object copy_of(nb::handle self, nb::handle memo) {
  auto& from = nb::cast<PythonCache&>(self);
  nb::object copy = nb::inst_alloc(self.type());
  MorphKVCache cache = from.locked([](MorphKVCache& c) { return c.copy(); });
  auto* to = new (nb::inst_ptr<PythonCache>(copy)) PythonCache(std::move(cache), from.layer());
  nb::inst_mark_ready(copy);
  to->kind = from.kind;
  if (!nb::hasattr(self, "__dict__")) return copy;
  nb::object attributes = self.attr("__dict__");
  if (!memo.is_none()) {
    memo[nb::int_(reinterpret_cast<std::uintptr_t>(self.ptr()))] = copy;
    attributes = nb::module_::import_("copy").attr("deepcopy")(attributes, memo);
  }
  copy.attr("__dict__").attr("update")(attributes);
  return copy;
}

nb::tuple get_state(nb::handle self) {
  auto& cache = nb::cast<PythonCache&>(self);
  const CacheState state = cache.locked([](MorphKVCache& c) { return c.state(); });
  const nb::object attributes =
      nb::hasattr(self, "__dict__") ? nb::object(self.attr("__dict__")) : nb::none();
  return nb::make_tuple(cache.config(), cache.layer(), cache.kind.module(), to_bytes(state),
                        attributes);
}

void set_state(nb::handle self, const nb::tuple& pickled) {
  if (pickled.size() != 5) throw std::invalid_argument("this is no pickled MorphKVCache");
  const auto config = nb::cast<CacheConfig>(pickled[0]);
  const auto layer = nb::cast<int>(pickled[1]);
  MorphKVCache cache(config, layer);
  cache.set_state(from_bytes(config, nb::cast<nb::tuple>(pickled[3])));
  ArrayKind kind(nb::cast<std::string>(pickled[2]));
  auto* to = new (nb::inst_ptr<PythonCache>(self)) PythonCache(std::move(cache), layer);
  nb::inst_mark_ready(self);
  to->kind = std::move(kind);
  if (const nb::object attributes = pickled[4]; !attributes.is_none()) {
    self.attr("__dict__").attr("update")(attributes);
  }
}

// What the system says of a file is OSError in Python.
template <typename Work>
void with_file(PythonCache& self, Work work) {
  try {
    self.locked(work);
  } catch (const std::runtime_error& error) {
    PyErr_SetString(PyExc_OSError, error.what());
    throw nb::python_error();
  }
}

CacheConfig config_or_default(const std::optional<CacheConfig>& config) {
  return config.value_or(CacheConfig{});
}

// From the number of layers, or an object that has `n_layers` or `layers`, such as a model of
// mlx_lm.
int layers_of(nb::handle model) {
  int n = 0;
  if (nb::try_cast(model, n)) return n;
  if (nb::hasattr(model, "n_layers")) return nb::cast<int>(model.attr("n_layers"));
  if (nb::hasattr(model, "layers"))
    return static_cast<int>(nb::len(nb::object(model.attr("layers"))));
  throw nb::type_error(
      "model: give the number of layers, or an object with `n_layers` or `layers`");
}

nb::list for_model(nb::handle model, const std::optional<CacheConfig>& config) {
  nb::list caches;
  int layer = 0;
  for (MorphKVCache& cache :
       CacheBuilder::for_model({.n_layers = layers_of(model)}, config_or_default(config))) {
    auto python_cache = std::make_unique<PythonCache>(std::move(cache), layer++);
    caches.append(nb::cast(python_cache.release(), nb::rv_policy::take_ownership));
  }
  return caches;
}

template <auto Getter>
auto measured(PythonCache& self) {
  return self.locked([](MorphKVCache& cache) { return (cache.*Getter)(); });
}

void bind_work(Class& c) {
  c.def(
       "__init__",
       [](PythonCache* self, const std::optional<CacheConfig>& config, int layer) {
         new (self) PythonCache(config_or_default(config), layer);
       },
       "config"_a.none() = nb::none(), "layer"_a = 0)
      .def("update_and_fetch",
           &fetch<&MorphKVCache::update_and_fetch, &MorphKVCache::update_and_fetch>, "keys"_a,
           "values"_a, "queries"_a.none() = nb::none(),
           nb::sig("def update_and_fetch(self, keys: ArrayT, values: ArrayT, "
                   "queries: ArrayT | None = None) -> tuple[ArrayT, ArrayT]"),
           "Stores keys and values [B, H, S, D] of any float type and strides; returns the rows "
           "held before the call plus all new ones, [B, H, rows + S, D], as new arrays of the "
           "kind of `keys`. Eviction changes only what is kept for the next call.\n\n"
           "`queries` [B, Hq, S, D]: for query source 'attention'. TypeError for what is no float "
           "array, ValueError for shapes that do not fit and for NaN; the cache is then unchanged.")
      .def("extend_and_fetch",
           &fetch<&MorphKVCache::extend_and_fetch, &MorphKVCache::extend_and_fetch>, "keys"_a,
           "values"_a, "queries"_a.none() = nb::none(),
           nb::sig("def extend_and_fetch(self, keys: ArrayT, values: ArrayT, "
                   "queries: ArrayT | None = None) -> tuple[ArrayT, ArrayT]"),
           "As update_and_fetch, but nothing is evicted: the rows stay until evict() or "
           "update_and_fetch(). To read a long prompt with a question in mind: extend_and_fetch() "
           "a piece, run the question through the model with guide_and_fetch() in its place, "
           "evict(), and so on.")
      .def("guide_and_fetch",
           &fetch<&MorphKVCache::guide_and_fetch, &MorphKVCache::guide_and_fetch>, "keys"_a,
           "values"_a, "queries"_a.none() = nb::none(),
           nb::sig("def guide_and_fetch(self, keys: ArrayT, values: ArrayT, "
                   "queries: ArrayT | None = None) -> tuple[ArrayT, ArrayT]"),
           "Returns the rows held and the guide's, [B, H, rows + S, D], and lets the guide say "
           "which rows evict() is to keep: by its queries, or its keys with query source 'keys'. "
           "The guide's rows, rotated from `offset` on, leave no trace. Several guides share the "
           "budget. ValueError if the policy takes no guide.")
      .def(
          "evict", [](PythonCache& self) { self.locked([](auto& cache) { cache.evict(); }); },
          "Lets the rows beyond the budget leave: those that the guides since the last "
          "extend_and_fetch() need least, or that the window does when there was none.")
      .def("make_mask", &make_mask, "n"_a, "window_size"_a.none() = nb::none(),
           nb::sig("def make_mask(self, n: int, window_size: int | None = None) -> typing.Any"),
           "Mask for the next call of n tokens over the rows that it will return, True = may see: "
           "None when every query sees every row, [n, rows + n], or per head [B, H, n, rows + n] "
           "when `window_size` is given.")
      .def(
          "is_trimmable", [](PythonCache&) { return false; },
          "False: an evicted row does not come back.")
      .def(
          "trim", [](PythonCache&, std::int64_t) { return 0; }, "n"_a, "Changes nothing; 0.")
      .def(
          "reset", [](PythonCache& self) { self.locked([](auto& cache) { cache.reset(); }); },
          "As newly made.")
      .def("__repr__", [](PythonCache& self) {
        const auto [offset, kept] = self.locked([](auto& cache) {
          return std::pair{cache.offset(), cache.tokens_kept()};
        });
        return "MorphKVCache(" + fields_text(self.config()) + "; offset " + std::to_string(offset) +
               ", " + std::to_string(kept) + " rows per head)";
      });
}

void bind_measures(Class& c) {
  c.def_prop_ro("config", &PythonCache::config, nb::rv_policy::copy)
      .def_prop_ro("layer", &PythonCache::layer)
      .def_prop_ro(
          "keys", [](PythonCache& self) { return stored_rows(self, false); },
          nb::sig("def keys(self) -> typing.Any"),
          "A copy of the rows held now, [B, H, rows, D]; None before the first call.")
      .def_prop_ro(
          "values", [](PythonCache& self) { return stored_rows(self, true); },
          nb::sig("def values(self) -> typing.Any"), "As `keys`.")
      .def_prop_ro("positions", &positions, nb::sig("def positions(self) -> typing.Any"),
                   "Token position of each row, ascending: numpy int64 [B, H, rows].")
      .def_prop_ro("offset", &measured<&MorphKVCache::offset>,
                   "Tokens seen so far = position of the next one; never the number of rows.")
      .def_prop_ro("kept_bytes", &measured<&MorphKVCache::kept_bytes>, "K and V of the rows held.")
      .def_prop_ro("allocated_bytes", &measured<&MorphKVCache::allocated_bytes>,
                   "K and V memory of this object.")
      .def_prop_ro("full_seq_bytes", &measured<&MorphKVCache::full_seq_bytes>,
                   "K and V if every token were held.")
      .def_prop_ro("compression_ratio", &measured<&MorphKVCache::compression_ratio>,
                   "full_seq_bytes / kept_bytes; 1.0 while empty.")
      .def_prop_ro("tokens_seen", &measured<&MorphKVCache::tokens_seen>,
                   "B * H * S summed over calls.")
      .def_prop_ro("tokens_kept", &measured<&MorphKVCache::tokens_kept>, "Rows of batch 0, head 0.")
      .def_prop_ro(
          "saturated", &measured<&MorphKVCache::saturated>,
          "Values too large for the stored type, stored as its largest (65504 in float16).");
}

void bind_copies(Class& c) {
  c.def_prop_rw(
       "state",
       [](PythonCache& self) {
         return to_dict(self.locked([](auto& cache) { return cache.state(); }), self.kind);
       },
       [](PythonCache& self, nb::handle state) {
         const CacheState s = from_dict(state);
         self.locked([&](auto& cache) { cache.set_state(s); });
         if (nb::object keys = state["keys"]; !keys.is_none()) self.kind = ArrayKind::of(keys);
       },
       nb::for_getter(nb::sig("def state(self) -> dict[str, typing.Any]")),
       nb::for_setter(nb::sig("def state(self, state: dict[str, typing.Any], /) -> None")),
       "All that is needed to go on bit for bit: keys, values, positions, offset, saturated, "
       "config, memory (of the policy). ValueError for a state that does not fit; the cache is "
       "then unchanged.")
      .def(
          "copy", [](nb::handle self) { return copy_of(self, nb::none()); },
          nb::sig("def copy(self) -> typing.Self"))
      .def(
          "__copy__", [](nb::handle self) { return copy_of(self, nb::none()); },
          nb::sig("def __copy__(self) -> typing.Self"))
      .def(
          "__deepcopy__", [](nb::handle self, const nb::dict& memo) { return copy_of(self, memo); },
          "memo"_a,
          nb::sig("def __deepcopy__(self, memo: dict[int, typing.Any], /) -> typing.Self"))
      .def("__getstate__", &get_state, nb::sig("def __getstate__(self) -> tuple[typing.Any, ...]"))
      .def("__setstate__", &set_state, "state"_a,
           nb::sig("def __setstate__(self, state: tuple[typing.Any, ...], /) -> None"))
      .def(
          "save",
          [](PythonCache& self, const std::filesystem::path& path) {
            with_file(self, [&](MorphKVCache& cache) { cache.save(path.string()); });
          },
          "path"_a, nb::sig("def save(self, path: str | os.PathLike[str]) -> None"),
          "Writes one file, beside `path`, then renamed. OSError when it cannot.")
      .def(
          "load",
          [](PythonCache& self, const std::filesystem::path& path) {
            with_file(self, [&](MorphKVCache& cache) { cache.load(path.string()); });
          },
          "path"_a, nb::sig("def load(self, path: str | os.PathLike[str]) -> None"),

          "Takes over a saved cache of the same configuration. OSError when the file cannot be "
          "read, ValueError when it is damaged or belongs to another cache; the cache is then "
          "unchanged.");
}

struct Builder {};

}  // namespace

void bind_cache(nb::module_& m) {
  m.attr("ArrayT") = nb::type_var("ArrayT");
  Class cache(m, "MorphKVCache", nb::is_weak_referenceable(),
              "A KV cache of constant size for one attention layer. Takes numpy, MLX, torch and "
              "all other arrays that speak DLPack or the buffer protocol, and returns the same "
              "kind. One thread at a time works on a cache; the GIL is released meanwhile.");
  bind_work(cache);
  bind_measures(cache);
  bind_copies(cache);

  nb::class_<Builder>(m, "CacheBuilder", "Caches for a model, or by the name of a policy.")
      .def_static("for_model", &for_model, "model"_a, "config"_a.none() = nb::none(),
                  nb::sig("def for_model(model: typing.Any, config: CacheConfig | None = None) -> "
                          "list[MorphKVCache]"),
                  "One cache per layer. `model`: the number of layers, or an object with "
                  "`n_layers` or `layers`.")
      .def_static(
          "create",
          [](const std::string& policy, const std::optional<CacheConfig>& config, int layer) {
            return new PythonCache(CacheBuilder::create(policy, config_or_default(config), layer),
                                   layer);
          },
          "policy"_a, "config"_a.none() = nb::none(), "layer"_a = 0, nb::rv_policy::take_ownership,
          "A cache by the name of its policy; the other fields from `config`.");
}

}  // namespace morphkv::python
