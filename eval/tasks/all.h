// One function for each task; eval/tasks.cc has them in the order of the tables.
#pragma once

#include "../task.h"

namespace morphkv::eval {

Task one_code_task();
Task eight_codes_task();
Task passkey_task();
Task number_string_task();
Task multi_key_task();
Task multi_value_task();
Task common_words_task();
Task few_shot_task();
Task instructions_task();
Task list_continuation_task();
Task repetition_task();

}  // namespace morphkv::eval
