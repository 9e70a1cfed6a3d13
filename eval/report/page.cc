#include "page.h"

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "blocks.h"
#include "plot.h"
#include "text.h"

namespace morphkv::eval {
namespace {

constexpr const char* kStyle =
    R"(:root{color-scheme:light dark;--page:#fff;--text:#1c1e21;--soft:#565b62;--grid:#dcdfe3;
--stripe:#f5f6f8}
@media (prefers-color-scheme:dark){:root{--page:#15171a;--text:#e8e9eb;--soft:#a9afb7;
--grid:#363b42;--stripe:#1d2024}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.5rem 1rem 4rem;max-width:68rem;background:var(--page);
color:var(--text);font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.6rem;margin:0 0 .5rem;overflow-wrap:anywhere}
h2{font-size:1.3rem;margin:3rem 0 .25rem;padding-top:.75rem;border-top:2px solid var(--grid)}
h3{font-size:1.05rem;margin:2rem 0 .25rem}
p{margin:.25rem 0;max-width:46rem}
.soft,dt,figcaption{color:var(--soft)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem;margin:1rem 0}
dd{margin:0;overflow-wrap:anywhere}
nav ul,.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;padding:0;
margin:.5rem 0}
.legend li{display:flex;align-items:center;gap:.5rem;font-size:.875rem}
.plots{display:flex;flex-wrap:wrap;gap:1rem 1.5rem}
figure{margin:0;flex:1 1 24rem;min-width:0;max-width:32rem}
figcaption,summary{font-size:.875rem}
summary{cursor:pointer;padding:.25rem 0}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.8125rem;font-variant-numeric:tabular-nums}
caption{text-align:left;padding:.25rem 0;color:var(--soft)}
th,td{padding:.2rem .6rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--grid)}
th:first-child{text-align:left}
tbody tr:nth-child(even){background:var(--stripe)}
a{color:inherit}
)";

std::string element(const std::string& name, std::string_view text) {
  return "<" + name + ">" + escaped(text) + "</" + name + ">";
}

std::string_view what_mode_means(std::string_view mode) {
  static const std::map<std::string_view, std::string_view> kMeanings = {
      {"whole",
       "Document and question are read at once and compressed at the end: the question is seen."},
      {"guided",
       "The document is read in pieces while the question says which rows matter: the question is "
       "seen, in constant memory."},
      {"stream",
       "The document is read in pieces and the question comes afterwards: it is not seen while "
       "rows leave."},
      {"generate", "A prompt, then what the model makes of it."},
      {kTextMode, "A text, token by token: how well the model foretells it."}};
  const auto found = kMeanings.find(mode);
  return found == kMeanings.end() ? "" : found->second;
}

// Numbers every plot and gives each arm one style throughout.
class Writer {
 public:
  explicit Writer(const std::vector<Block>& blocks) {
    for (const Block& block : blocks) {
      for (const std::string& arm : block.arms) {
        styles_.try_emplace(arm, static_cast<int>(styles_.size()));
      }
    }
  }

  std::string block(const Block& block);

 private:
  using Pick = std::function<std::optional<Estimate>(const Cell&)>;
  std::string plots(const Block& block);
  // Empty where no cell has the figure.
  std::string figure(const Block& block, Plot plot, const Pick& pick);
  std::string legend(const Block& block) const;

  std::map<std::string, int> styles_;
  int figures_ = 0;
};

std::string Writer::figure(const Block& block, Plot plot, const Pick& pick) {
  for (const std::string& arm : block.arms) {
    Series series{shown_name(arm), styles_.at(arm), {}};
    for (const int budget : block.budgets) {
      const Entry* entry = block.find(arm, budget);
      if (entry == nullptr) continue;
      const int rows = entry->cell.rows_kept > 0 ? entry->cell.rows_kept : budget;
      if (const auto y = pick(entry->cell)) series.points.push_back({1.0 * rows, *y});
    }
    if (!series.points.empty()) plot.series.push_back(std::move(series));
  }
  if (plot.series.empty()) return "";
  if (const Entry* full = block.full()) {
    if (const auto y = pick(full->cell)) plot.full = y->mean;
  }
  const std::string caption = element("figcaption", plot.title);
  plot.title += " (" + heading_of(block) + ")";
  return "<figure>\n" + caption + "\n" + to_svg(plot, "plot" + std::to_string(++figures_)) +
         "</figure>\n";
}

std::string Writer::plots(const Block& block) {
  const auto score = [](const Cell& cell) { return std::optional(cell.score); };
  const auto measure = [](const char* name) {
    return [name](const Cell& cell) -> std::optional<Estimate> {
      const auto found = cell.measures.find(name);
      if (found == cell.measures.end()) return std::nullopt;
      return found->second;
    };
  };
  const auto speed = [](const Cell& cell) -> std::optional<Estimate> {
    if (cell.step_ms <= 0) return std::nullopt;
    return Estimate{cell.step_ms, cell.step_ms, cell.step_ms};
  };
  Plot quality{.title = "Score, higher is better", .y_label = "score"};
  if (block.is_text()) {
    quality = {.title = "Perplexity, lower is better",
               .y_label = "perplexity (log scale)",
               .scale = Scale::kLog,
               .form = Form::kPerplexity};
  }
  std::string out = "<div class=\"plots\">\n" + figure(block, quality, score);
  out += figure(block,
                {.title = "Time of a token, lower is better",
                 .y_label = "median ms per token",
                 .scale = Scale::kFromZero,
                 .form = Form::kPerplexity},
                speed);
  if (block.is_text()) {
    out += figure(block,
                  {.title = "Divergence from the full cache, lower is better",
                   .y_label = "KL divergence, nats per token",
                   .scale = Scale::kFromZero,
                   .form = Form::kNumber},
                  measure("kl"));
  }
  return out + "</div>\n";
}

std::string Writer::legend(const Block& block) const {
  std::string out = "<ul class=\"legend\">\n";
  for (const std::string& arm : block.arms) {
    out += "<li>" + legend_key(styles_.at(arm)) + element("span", shown_name(arm)) + "</li>\n";
  }
  if (block.full() != nullptr) {
    out += "<li>" + legend_key(-1) + element("span", shown_name(kFull)) + "</li>\n";
  }
  return out + "</ul>\n";
}

// --- Tables --------------------------------------------------------------------------------------

struct Column {
  std::string head;
  std::function<std::string(const Entry&)> text;
};

std::string shown_ms(double ms, bool measured) { return measured ? four_figures(ms) : "-"; }

Form form_of(const std::string& measure) {
  if (measure.starts_with("ppl")) return Form::kPerplexity;
  return measure.starts_with("top1") ? Form::kPercent : Form::kNumber;
}

void add_measure_columns(std::vector<Column>& columns, const Block& block) {
  std::set<std::string> names;
  for (const auto* entries : {&block.entries, &block.references}) {
    for (const Entry& entry : *entries) {
      for (const auto& [name, estimate] : entry.cell.measures) names.insert(name);
    }
  }
  for (const std::string& name : names) {
    std::string head = name;
    std::replace(head.begin(), head.end(), '_', ' ');
    columns.push_back({head, [name](const Entry& entry) {
                         const auto found = entry.cell.measures.find(name);
                         if (found == entry.cell.measures.end()) return std::string("-");
                         return to_text(found->second, form_of(name));
                       }});
  }
}

std::vector<Column> columns_of(const Block& block) {
  const bool text = block.is_text();
  const Form form = text ? Form::kPerplexity : Form::kPercent;
  std::vector<Column> columns = {
      {"budget",
       [](const Entry& e) { return e.cell.budget == 0 ? "-" : with_commas(e.cell.budget); }},
      {"rows kept",
       [](const Entry& e) { return e.cell.rows_kept == 0 ? "-" : with_commas(e.cell.rows_kept); }},
      {text ? "stretches" : "n", [](const Entry& e) { return with_commas(e.cell.trials); }}};
  if (!text) {
    columns.push_back({"documents", [](const Entry& e) { return with_commas(e.cell.documents); }});
  }
  if (block.is_mean()) {
    columns.push_back({"tasks", [](const Entry& e) { return with_commas(e.tasks); }});
  }
  columns.push_back({text ? "perplexity" : "score",
                     [form](const Entry& e) { return to_text(e.cell.score, form); }});
  columns.push_back({text ? "over full cache" : "of full cache", [text](const Entry& e) {
                       const Form share = text ? Form::kNumber : Form::kPercent;
                       return e.cell.has_full ? to_text(e.cell.of_full, share) : "-";
                     }});
  add_measure_columns(columns, block);
  columns.push_back({"ms per token",
                     [](const Entry& e) { return shown_ms(e.cell.step_ms, e.cell.step_ms > 0); }});
  columns.push_back({"of it eviction",
                     [](const Entry& e) { return shown_ms(e.cell.evict_ms, e.cell.step_ms > 0); }});
  columns.push_back(
      {"reading, ms", [](const Entry& e) { return shown_ms(e.cell.read_ms, e.cell.read_ms > 0); }});
  columns.push_back({"KV kept, MiB", [](const Entry& e) {
                       const auto bytes = static_cast<double>(e.cell.kv_bytes_kept);
                       return bytes > 0 ? four_figures(bytes / 1048576.0) : "-";
                     }});
  return columns;
}

std::string table_row(const Entry& entry, const std::vector<Column>& columns) {
  std::string out = "<tr><th scope=\"row\">" + escaped(shown_name(entry.cell.arm)) + "</th>";
  for (const Column& column : columns) out += element("td", column.text(entry));
  return out + "</tr>\n";
}

std::string table_of(const Block& block) {
  const std::vector<Column> columns = columns_of(block);
  std::string out = "<div class=\"wide\"><table>\n";
  out +=
      element("caption", heading_of(block) + ": figures, with 95 % intervals in brackets") + "\n";
  out += "<thead><tr><th scope=\"col\">arm</th>";
  for (const Column& column : columns) {
    out += "<th scope=\"col\">" + escaped(column.head) + "</th>";
  }
  out += "</tr></thead>\n<tbody>\n";
  for (const Entry& reference : block.references) out += table_row(reference, columns);
  for (const std::string& arm : block.arms) {
    for (const int budget : block.budgets) {
      if (const Entry* entry = block.find(arm, budget)) out += table_row(*entry, columns);
    }
  }
  return out + "</tbody>\n</table></div>\n";
}

std::string title_of(const Block& block) {
  std::string title = block.is_mean() ? "Mean over the tasks" : block.task;
  if (block.tokens > 0) title += ", " + with_commas(block.tokens) + " tokens";
  return title;
}

std::string Writer::block(const Block& block) {
  std::string out = element("h3", title_of(block)) + "\n";
  if (!block.entries.empty()) out += legend(block) + plots(block);
  return out + "<details><summary>Figures, counts and intervals</summary>\n" + table_of(block) +
         "</details>\n";
}

// --- The page ------------------------------------------------------------------------------------

std::string head_of(const RunInfo& info) {
  std::string out = "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n";
  out += "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n";
  out += element("title", "morphkv eval: " + info.model) + "\n";
  return out + "<style>\n" + kStyle + plot_style() + "</style>\n</head>\n";
}

std::string introduction(const RunInfo& info) {
  std::string out = element("h1", "morphkv eval: " + info.model) + "\n<dl>\n";
  const std::pair<const char*, std::string> facts[] = {{"model", info.model_description},
                                                       {"morphkv", info.version},
                                                       {"llama.cpp", info.engine},
                                                       {"CPU", info.cpu},
                                                       {"seed", std::to_string(info.seed)}};
  for (const auto& [name, value] : facts) out += element("dt", name) + element("dd", value) + "\n";
  out += "</dl>\n";
  return out +
         "<p>Bars and brackets are 95 % intervals of a bootstrap over documents, of texts over "
         "stretches. The dashed line is the full cache, which evicts nothing. A mean over tasks is "
         "taken, at each budget, over the tasks that all arms have there; the intervals of the "
         "tasks are combined as independent ones.</p>\n";
}

std::string mode_list(const std::vector<std::string>& modes) {
  std::string out = "<nav aria-label=\"Modes\"><ul>\n";
  for (std::size_t i = 0; i < modes.size(); ++i) {
    out += "<li><a href=\"#mode" + std::to_string(i) + "\">" + escaped(modes[i]) + "</a></li>\n";
  }
  return out + "</ul></nav>\n";
}

}  // namespace

std::string to_page(const RunInfo& info, const std::vector<Cell>& cells) {
  const std::vector<Block> blocks = to_blocks(cells);
  std::vector<std::string> modes;
  for (const Block& block : blocks) {
    if (modes.empty() || modes.back() != block.mode) modes.push_back(block.mode);
  }
  Writer writer(blocks);
  std::string out = head_of(info) + "<body>\n<header>\n" + introduction(info);
  if (modes.size() > 1) out += mode_list(modes);
  out += "</header>\n<main>\n";
  if (blocks.empty()) out += "<p>There are no trials yet.</p>\n";
  for (std::size_t i = 0; i < modes.size(); ++i) {
    const std::string id = "mode" + std::to_string(i);
    out += "<section" + attribute("id", id) + attribute("aria-labelledby", id + "-head") + ">\n";
    out += "<h2" + attribute("id", id + "-head") + ">" + escaped(modes[i]) + "</h2>\n";
    out += "<p class=\"soft\">" + escaped(what_mode_means(modes[i])) + "</p>\n";
    for (const Block& block : blocks) {
      if (block.mode == modes[i]) out += writer.block(block);
    }
    out += "</section>\n";
  }
  return out + "</main>\n</body>\n</html>\n";
}

}  // namespace morphkv::eval
