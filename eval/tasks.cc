#include <algorithm>
#include <stdexcept>
#include <string>

#include "task.h"
#include "tasks/all.h"

namespace morphkv::eval {

const std::vector<Task>& tasks() {
  static const std::vector<Task> kTasks = {
      passkey_task(),      number_string_task(),     one_code_task(),     eight_codes_task(),
      multi_key_task(),    multi_value_task(),       common_words_task(), few_shot_task(),
      instructions_task(), list_continuation_task(), repetition_task(),
  };
  return kTasks;
}

const Task& find_task(std::string_view name) {
  const auto found =
      std::find_if(tasks().begin(), tasks().end(), [&](const Task& t) { return t.name == name; });
  if (found != tasks().end()) return *found;
  std::string names;
  for (const Task& task : tasks()) {
    names += names.empty() ? "" : ", ";
    names += task.name;
  }
  throw std::invalid_argument("there is no task '" + std::string(name) + "'; the tasks are " +
                              names);
}

}  // namespace morphkv::eval
