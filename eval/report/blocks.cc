#include "blocks.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "text.h"

namespace morphkv::eval {
namespace {

using Pointers = std::vector<const Entry*>;

template <class Value>
void add_once(std::vector<Value>& values, const Value& value) {
  if (std::find(values.begin(), values.end(), value) == values.end()) values.push_back(value);
}

// --- Tasks ---------------------------------------------------------------------------------------

bool same_questions(const Block& block, const Cell& cell) {
  return cell.task == block.task && cell.tokens == block.tokens;
}

void add_references(Block& block, const std::vector<Cell>& cells) {
  for (const std::string_view mode : {std::string_view(block.mode), full_mode(block.mode)}) {
    for (const Cell& cell : cells) {
      if (cell.budget != 0 || cell.mode != mode || !same_questions(block, cell)) continue;
      const auto same_arm = [&](const Entry& entry) { return entry.cell.arm == cell.arm; };
      if (std::none_of(block.references.begin(), block.references.end(), same_arm)) {
        block.references.push_back({cell});
      }
    }
  }
}

bool is_shown_elsewhere(const Block& block, const std::vector<Cell>& cells) {
  return std::any_of(cells.begin(), cells.end(), [&](const Cell& cell) {
    return cell.budget != 0 && cell.mode != block.mode && full_mode(cell.mode) == block.mode &&
           same_questions(block, cell);
  });
}

std::vector<Block> task_blocks(const std::vector<Cell>& cells, const std::string& mode) {
  std::vector<Block> blocks;
  for (const Cell& cell : cells) {
    if (cell.mode != mode) continue;
    auto block = std::find_if(blocks.begin(), blocks.end(),
                              [&](const Block& b) { return same_questions(b, cell); });
    if (block == blocks.end()) {
      blocks.push_back({.task = cell.task, .mode = mode, .tokens = cell.tokens});
      block = std::prev(blocks.end());
    }
    if (cell.budget == 0) continue;
    add_once(block->arms, cell.arm);
    add_once(block->budgets, cell.budget);
    block->entries.push_back({cell});
  }
  std::erase_if(blocks,
                [&](const Block& b) { return b.arms.empty() && is_shown_elsewhere(b, cells); });
  for (Block& block : blocks) {
    std::sort(block.budgets.begin(), block.budgets.end());
    add_references(block, cells);
  }
  return blocks;
}

// --- Means over tasks ----------------------------------------------------------------------------

template <class Pick>
Estimate mean_of(const Pointers& entries, bool geometric, Pick pick) {
  const auto to = [&](double x) { return geometric ? std::log(x) : x; };
  const auto from = [&](double x) { return geometric ? std::exp(x) : x; };
  double sum = 0.0;
  double below = 0.0;
  double above = 0.0;
  for (const Entry* entry : entries) {
    const Estimate& e = pick(entry->cell);
    sum += to(e.mean);
    below += std::pow(to(e.mean) - to(e.low), 2);
    above += std::pow(to(e.high) - to(e.mean), 2);
  }
  const auto count = static_cast<double>(entries.size());
  return {from(sum / count), from((sum - std::sqrt(below)) / count),
          from((sum + std::sqrt(above)) / count)};
}

// Of what every task has measured; 0 otherwise.
double mean_ms(const Pointers& entries, double Cell::*member) {
  double sum = 0.0;
  for (const Entry* entry : entries) {
    if (entry->cell.*member <= 0) return 0.0;
    sum += entry->cell.*member;
  }
  return sum / static_cast<double>(entries.size());
}

void add_measures(Cell& mean, const Pointers& entries) {
  for (const auto& [name, estimate] : entries.front()->cell.measures) {
    const auto has = [&, &key = name](const Entry* e) { return e->cell.measures.contains(key); };
    if (!std::all_of(entries.begin(), entries.end(), has)) continue;
    const auto pick = [&, &key = name](const Cell& cell) -> const Estimate& {
      return cell.measures.at(key);
    };
    mean.measures[name] = mean_of(entries, name.starts_with("ppl"), pick);
  }
}

Entry mean_entry(const Pointers& entries) {
  const Cell& first = entries.front()->cell;
  Cell mean;
  mean.mode = first.mode;
  mean.arm = first.arm;
  mean.budget = first.budget;
  mean.has_full = true;
  for (const Entry* entry : entries) {
    const Cell& cell = entry->cell;
    mean.trials += cell.trials;
    mean.documents += cell.documents;
    mean.has_full &= cell.has_full;
    mean.rows_kept = std::max(mean.rows_kept, cell.rows_kept);
    mean.kv_bytes_kept = std::max(mean.kv_bytes_kept, cell.kv_bytes_kept);
    mean.kv_bytes_allocated = std::max(mean.kv_bytes_allocated, cell.kv_bytes_allocated);
  }
  const bool text = first.mode == kTextMode;
  mean.score = mean_of(entries, text, [](const Cell& c) -> const Estimate& { return c.score; });
  if (mean.has_full) {
    mean.of_full =
        mean_of(entries, text, [](const Cell& c) -> const Estimate& { return c.of_full; });
  }
  add_measures(mean, entries);
  mean.read_ms = mean_ms(entries, &Cell::read_ms);
  mean.step_ms = mean_ms(entries, &Cell::step_ms);
  mean.evict_ms = mean_ms(entries, &Cell::evict_ms);
  return {mean, static_cast<int>(entries.size())};
}

void add_budget(Block& mean, const std::vector<Block>& tasks, int budget) {
  std::vector<std::string> arms;
  for (const std::string& arm : mean.arms) {
    const auto has = [&](const Block& task) { return task.find(arm, budget) != nullptr; };
    if (std::any_of(tasks.begin(), tasks.end(), has)) arms.push_back(arm);
  }
  std::vector<Pointers> by_arm(arms.size());
  for (const Block& task : tasks) {
    Pointers entries;
    for (const std::string& arm : arms) entries.push_back(task.find(arm, budget));
    if (std::find(entries.begin(), entries.end(), nullptr) != entries.end()) continue;
    for (std::size_t a = 0; a < arms.size(); ++a) by_arm[a].push_back(entries[a]);
  }
  for (const Pointers& entries : by_arm) {
    if (!entries.empty()) mean.entries.push_back(mean_entry(entries));
  }
}

Block mean_block(const std::vector<Block>& tasks) {
  Block mean{.mode = tasks.front().mode, .tokens = tasks.front().tokens};
  std::vector<std::string> references;
  for (const Block& task : tasks) {
    if (task.tokens != mean.tokens) mean.tokens = 0;
    for (const std::string& arm : task.arms) add_once(mean.arms, arm);
    for (const int budget : task.budgets) add_once(mean.budgets, budget);
    for (const Entry& reference : task.references) add_once(references, reference.cell.arm);
  }
  std::sort(mean.budgets.begin(), mean.budgets.end());
  for (const int budget : mean.budgets) add_budget(mean, tasks, budget);
  for (const std::string& arm : references) {
    Pointers entries;
    for (const Block& task : tasks) {
      for (const Entry& reference : task.references) {
        if (reference.cell.arm == arm) entries.push_back(&reference);
      }
    }
    mean.references.push_back(mean_entry(entries));
  }
  return mean;
}

}  // namespace

const Entry* Block::find(std::string_view arm, int budget) const {
  for (const Entry& entry : entries) {
    if (entry.cell.budget == budget && entry.cell.arm == arm) return &entry;
  }
  return nullptr;
}

const Entry* Block::full() const {
  for (const Entry& entry : references) {
    if (entry.cell.arm == kFull) return &entry;
  }
  return nullptr;
}

int Block::tasks_at(int budget) const {
  for (const Entry& entry : entries) {
    if (entry.cell.budget == budget) return entry.tasks;
  }
  return 0;
}

std::vector<Block> to_blocks(const std::vector<Cell>& cells) {
  std::vector<std::string> modes;
  for (const Cell& cell : cells) add_once(modes, cell.mode);
  std::vector<Block> blocks;
  for (const std::string& mode : modes) {
    std::vector<Block> tasks = task_blocks(cells, mode);
    if (tasks.size() > 1) blocks.push_back(mean_block(tasks));
    std::move(tasks.begin(), tasks.end(), std::back_inserter(blocks));
  }
  return blocks;
}

std::string heading_of(const Block& block) {
  std::string heading = block.is_mean() ? "mean over the tasks" : block.task;
  heading += ", " + block.mode;
  if (block.tokens > 0) return heading + ", " + with_commas(block.tokens) + " tokens";
  return heading + (block.is_mean() ? ", several lengths" : "");
}

std::string shown_name(std::string_view arm) {
  return arm == kFull ? "full cache" : std::string(arm);
}

std::string count_of(const Block& block) {
  std::set<int> counts;
  for (const Entry& entry : block.entries) counts.insert(entry.cell.trials);
  if (counts.empty()) return "n 0";
  std::string count = "n " + with_commas(*counts.begin());
  if (counts.size() > 1) count += "-" + with_commas(*counts.rbegin());
  return count;
}

}  // namespace morphkv::eval
