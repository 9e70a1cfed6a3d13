#include "record.h"

#include <nlohmann/json.hpp>

namespace morphkv::eval {
namespace {

using Json = nlohmann::ordered_json;

Json json_of(const Estimate& estimate) {
  return {{"mean", estimate.mean}, {"low", estimate.low}, {"high", estimate.high}};
}

Json json_of(const Cell& cell) {
  Json measures = Json::object();
  for (const auto& [name, estimate] : cell.measures) measures[name] = json_of(estimate);
  return {{"task", cell.task},
          {"mode", cell.mode},
          {"tokens", cell.tokens},
          {"arm", cell.arm},
          {"budget", cell.budget},
          {"trials", cell.trials},
          {"documents", cell.documents},
          {"score", json_of(cell.score)},
          {"of_full", cell.has_full ? json_of(cell.of_full) : Json()},
          {"measures", measures},
          {"tokens_judged", cell.tokens_judged},
          {"rows_kept", cell.rows_kept},
          {"kv_bytes_kept", cell.kv_bytes_kept},
          {"kv_bytes_allocated", cell.kv_bytes_allocated},
          {"read_ms", cell.read_ms},
          {"step_ms", cell.step_ms},
          {"evict_ms", cell.evict_ms}};
}

}  // namespace

std::string to_json(const RunInfo& info, const std::vector<Cell>& cells, std::string_view date) {
  Json json = {{"benchmark", "eval"},
               {"date", date},
               {"version", info.version},
               {"engine", info.engine},
               {"model", info.model},
               {"model_fingerprint", info.model_fingerprint},
               {"model_description", info.model_description},
               {"cpu", info.cpu},
               {"seed", info.seed},
               {"interval", "95 % percentile bootstrap over documents; of texts: over stretches"}};
  json["cells"] = Json::array();
  for (const Cell& cell : cells) json["cells"].push_back(json_of(cell));
  // A file name need not be UTF-8, JSON must be.
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace morphkv::eval
