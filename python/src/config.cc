// CacheConfig: a value with keyword fields, checked when it is made.
#include "morphkv/config.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <stdexcept>
#include <tuple>
#include <type_traits>

#include "bindings.h"
#include "morphkv/settings.h"

namespace morphkv::python {
namespace {

namespace nb = nanobind;
using namespace nb::literals;

using Fields = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                          std::string, std::string, std::string, std::uint64_t>;

int to_int(const char* field, std::int64_t value) {
  if (value < std::numeric_limits<int>::min() || value > std::numeric_limits<int>::max()) {
    throw std::invalid_argument(std::string(field) + " " + std::to_string(value) +
                                " is out of range: use at most " + std::to_string(kMaxBudget));
  }
  return static_cast<int>(value);
}

CacheConfig make_config(const Fields& fields) {
  const auto& [budget, n_sink, window, recent, pool, fusion, queries, policy, seed] = fields;
  CacheConfig config{.budget = to_int("budget", budget),
                     .n_sink = to_int("n_sink", n_sink),
                     .window = to_int("window", window),
                     .recent = to_int("recent", recent),
                     .pool = to_int("pool", pool),
                     .fusion = choice_of<Fusion>("fusion", fusion),
                     .queries = choice_of<QuerySource>("queries", queries),
                     .policy = policy,
                     .seed = seed};
  validate(config);
  return config;
}

Fields fields_of(const CacheConfig& c) {
  return {c.budget,
          c.n_sink,
          c.window,
          c.recent,
          c.pool,
          std::string(to_string(c.fusion)),
          std::string(to_string(c.queries)),
          c.policy,
          c.seed};
}

}  // namespace

std::string fields_text(const CacheConfig& c) {
  std::string text;
  for_each_cache_field([&](const auto& field) {
    const auto& value = c.*field.member;
    constexpr bool kWord = !std::is_integral_v<std::remove_cvref_t<decltype(value)>>;
    const std::string shown = kWord ? "'" + value_text(value) + "'" : value_text(value);
    text += (text.empty() ? "" : ", ") + std::string(field.name) + "=" + shown;
  });
  return text;
}

void bind_config(nb::module_& m) {
  nb::class_<CacheConfig>(m, "CacheConfig",
                          "The numbers that govern retention. Immutable; checked when made: "
                          "ValueError names the field, its value, the limit and the fix.")
      .def(
          "__init__",
          [](CacheConfig* self, std::int64_t budget, std::int64_t n_sink, std::int64_t window,
             std::int64_t recent, std::int64_t pool, const std::string& fusion,
             const std::string& queries, const std::string& policy, std::uint64_t seed) {
            new (self) CacheConfig(
                make_config({budget, n_sink, window, recent, pool, fusion, queries, policy, seed}));
          },
          nb::kw_only(), "budget"_a = 512, "n_sink"_a = 4, "window"_a = 8, "recent"_a = 0,
          "pool"_a = 1, "fusion"_a = "mean", "queries"_a = "keys", "policy"_a = "morphkv",
          "seed"_a = 0)
      .def_ro("budget", &CacheConfig::budget, "Most rows of a KV head between calls.")
      .def_ro("n_sink", &CacheConfig::n_sink, "First positions, never evicted.")
      .def_ro("window", &CacheConfig::window,
              "Last tokens whose queries score the others; protected.")
      .def_ro("recent", &CacheConfig::recent,
              "Rows of the protected tail, at least `window`; 0 = `window`.")
      .def_ro("pool", &CacheConfig::pool,
              "Odd width of the neighbour maximum over scores; 1 = off.")
      .def_prop_ro(
          "fusion", [](const CacheConfig& c) { return to_string(c.fusion); },
          "How the window's weights become one score: 'mean' or 'max'.")
      .def_prop_ro(
          "queries", [](const CacheConfig& c) { return to_string(c.queries); },
          "What scores the rows: 'keys' (stored keys stand in for queries) or 'attention' (the "
          "model's own queries).")
      .def_ro("policy", &CacheConfig::policy, "Name of the scoring rule.")
      .def_ro("seed", &CacheConfig::seed, "Of the policy 'random'.")
      .def(
          "__eq__",
          [](const CacheConfig& self, nb::handle other) -> nb::object {
            if (!nb::isinstance<CacheConfig>(other)) return nb::not_implemented();
            return nb::bool_(self == nb::cast<const CacheConfig&>(other));
          },
          nb::arg("other").none(), nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__", [](const CacheConfig& self) { return nb::hash(nb::cast(fields_of(self))); })
      .def("__repr__",
           [](const CacheConfig& self) { return "CacheConfig(" + fields_text(self) + ")"; })
      .def("__getstate__", &fields_of)
      .def("__setstate__", [](CacheConfig& self, const Fields& fields) {
        new (&self) CacheConfig(make_config(fields));
      });

  nb::class_<Profile>(m, "Profile",
                      "Settings for trained models, by what they are for; docs/quality.md has the "
                      "figures behind them.")
      .def_ro("name", &Profile::name)
      .def_ro("why", &Profile::why, "What it is for, in one line.")
      .def(
          "with_budget",
          [](const Profile& p, std::int64_t budget) {
            const CacheConfig config = p.with_budget(to_int("budget", budget));
            validate(config);
            return config;
          },
          "budget"_a = 512, "The CacheConfig with that budget.")
      .def_prop_ro(
          "prefill", [](const Profile& p) { return to_string(p.prefill); },
          "How a prompt longer than the budget is read: 'guided', 'stream' or 'whole'.")
      .def_ro("guide_text", &Profile::guide_text,
              "A text that guides beside the prompt's own end; '' = none.");
  m.def("profiles", &profiles, "All profiles; the first one is the default of `morphkv run`.");
  m.def("settings_table", &settings_table,
        "What a Session can be told, as a Markdown table: names, limits, values in each profile.");
  m.def("find_profile", &find_profile, "name"_a, nb::rv_policy::copy,
        "The Profile of that name: document, chat, reference or paper. ValueError names them.");
}

}  // namespace morphkv::python
