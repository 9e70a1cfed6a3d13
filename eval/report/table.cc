#include "table.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "blocks.h"
#include "text.h"

namespace morphkv::eval {
namespace {

constexpr int kLeastWidth = 40;
constexpr int kGap = 2;

std::string padded_left(const std::string& text, int width) {
  return std::string(static_cast<std::size_t>(std::max(0, width - columns(text))), ' ') + text;
}

std::string padded_right(const std::string& text, int width) {
  return text + std::string(static_cast<std::size_t>(std::max(0, width - columns(text))), ' ');
}

void add_line(std::string& out, std::string line) {
  line.erase(line.find_last_not_of(' ') + 1);
  out += line + "\n";
}

// The first `width` columns of a text go out of it.
std::string taken(std::string& text, int width) {
  std::size_t end = 0;
  while (end < text.size() && columns(std::string_view(text).substr(0, end + 1)) <= width) ++end;
  std::string head = text.substr(0, end);
  text.erase(0, end);
  return head;
}

// Items beside each other, as many as fit.
void add_items(std::string& out, const std::vector<std::string>& items, int width) {
  std::string line;
  for (std::string item : items) {
    if (!line.empty() && columns(line) + kGap + columns(item) > width) {
      add_line(out, line);
      line.clear();
    }
    while (columns(item) > width) add_line(out, taken(item, width));
    line += (line.empty() ? "" : std::string(kGap, ' ')) + item;
  }
  if (!line.empty()) add_line(out, line);
}

// --- Grids ---------------------------------------------------------------------------------------

struct Row {
  std::string name;
  std::vector<std::string> entries;  // [column]
};

// Columns from `begin` to `end`, below a row of heads, the first row.
void add_columns(std::string& out, const std::vector<Row>& rows, std::size_t begin, std::size_t end,
                 const std::vector<int>& widths, int name_width, int width) {
  for (const Row& row : rows) {
    std::string name = row.name;
    while (columns(name) > name_width) {
      if (columns(name) <= width) {
        add_line(out, name);
        name.clear();
      } else {
        add_line(out, taken(name, width));
      }
    }
    std::string line = padded_right(name, name_width);
    for (std::size_t c = begin; c < end; ++c) {
      line += std::string(kGap, ' ') + padded_left(row.entries[c], widths[c]);
    }
    add_line(out, line);
  }
}

// Names that leave no room for two columns stand on a line of their own.
void add_grid(std::string& out, const std::vector<Row>& rows, int width) {
  std::vector<int> widths(rows.front().entries.size());
  int widest = 0;
  for (const Row& row : rows) {
    for (std::size_t c = 0; c < widths.size(); ++c) {
      widths[c] = std::max(widths[c], columns(row.entries[c]));
      widest = std::max(widest, widths[c]);
    }
  }
  const int room = std::max(width / 4, width - 2 * (kGap + widest));
  int name_width = 0;
  for (const Row& row : rows) {
    if (columns(row.name) <= room) name_width = std::max(name_width, columns(row.name));
  }
  for (std::size_t begin = 0; begin < widths.size();) {
    int used = name_width + kGap + widths[begin];
    std::size_t end = begin + 1;
    while (end < widths.size() && used + kGap + widths[end] <= width) used += kGap + widths[end++];
    add_columns(out, rows, begin, end, widths, name_width, width);
    begin = end;
  }
}

// Null where a cell has no such figure.
using Pick = std::function<const Estimate*(const Cell&)>;

struct Figure {
  std::string title;  // of the grid, where a block has several
  Form form;
  Pick pick;
};

Figure score_figure(std::string title, Form form) {
  return {std::move(title), form, [](const Cell& cell) { return &cell.score; }};
}

Figure measure_figure(std::string title, const char* name, Form form) {
  return {std::move(title), form, [name](const Cell& cell) -> const Estimate* {
            const auto found = cell.measures.find(name);
            return found == cell.measures.end() ? nullptr : &found->second;
          }};
}

std::vector<Figure> figures_of(const Block& block) {
  if (!block.is_text()) return {score_figure("", Form::kPercent)};
  return {score_figure("perplexity", Form::kPerplexity),
          measure_figure("KL divergence", "kl", Form::kNumber),
          measure_figure("top-1 agreement", "top1", Form::kPercent)};
}

std::string shown(const Entry* entry, const Figure& figure) {
  const Estimate* estimate = entry == nullptr ? nullptr : figure.pick(entry->cell);
  return estimate == nullptr ? "-" : to_text(*estimate, figure.form);
}

std::vector<Row> rows_of(const Block& block, const Figure& figure) {
  std::vector<Row> rows = {{figure.title.empty() ? "budget" : figure.title, {}}};
  for (const int budget : block.budgets) rows[0].entries.push_back(with_commas(budget));
  for (const std::string& arm : block.arms) {
    Row row{printable(shown_name(arm)), {}};
    for (const int budget : block.budgets) {
      row.entries.push_back(shown(block.find(arm, budget), figure));
    }
    rows.push_back(std::move(row));
  }
  if (!block.is_mean()) return rows;
  Row tasks{"tasks", {}};
  for (const int budget : block.budgets) {
    tasks.entries.push_back(std::to_string(block.tasks_at(budget)));
  }
  rows.push_back(std::move(tasks));
  return rows;
}

void add_block(std::string& out, const Block& block, int width) {
  const std::vector<Figure> figures = figures_of(block);
  std::vector<std::string> head = {printable(heading_of(block)) + ":"};
  for (const Entry& reference : block.references) {
    std::string item =
        printable(shown_name(reference.cell.arm)) + " " + shown(&reference, figures.front());
    item += " (n " + with_commas(reference.cell.trials);
    if (block.is_mean()) item += ", " + std::to_string(reference.tasks) + " tasks";
    head.push_back(item + ")");
  }
  if (!block.entries.empty()) head.push_back(count_of(block));
  add_items(out, head, width);
  if (block.budgets.empty()) return;
  for (const Figure& figure : figures) add_grid(out, rows_of(block, figure), width);
}

}  // namespace

std::string to_table(const std::vector<Cell>& cells, int width) {
  std::string out;
  for (const Block& block : to_blocks(cells)) {
    if (!out.empty()) out += "\n";
    add_block(out, block, std::max(width, kLeastWidth));
  }
  return out;
}

}  // namespace morphkv::eval
