// Chats in the template of their model: SmolLM2's own, and templates of tiny models for what others
// do.
#include "morphkv/llama_cpp/chat_template.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "model_support.h"
#include "tiny_model.h"

namespace morphkv::test {
namespace {

using llama_cpp::BadModelFile;
using llama_cpp::ChatTemplate;
using llama_cpp::ModelPtr;
using Chat = std::vector<llama_cpp::ChatMessage>;

const std::string kOwnSystem =
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
    "Face<|im_end|>\n";
const std::string kAnswer = "<|im_start|>assistant\n";

std::string turn(const std::string& role, const std::string& content) {
  return "<|im_start|>" + role + "\n" + content + "<|im_end|>\n";
}

ModelPtr model_with(const std::string& chat_template, bool add_bos = false) {
  return make_tiny_model({.bos = 7, .add_bos = add_bos, .chat_template = chat_template});
}

// What `call` throws; "" for nothing.
template <class Error, class Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// --- SmolLM2 --------------------------------------------------------------------------------

TEST(ChatTemplate, WritesAChatAsTheModelWasTrainedOnIt) {
  const ChatTemplate chat(test_model());
  EXPECT_EQ(chat.render({{"system", "Be brief."}, {"user", "Hi"}}),
            turn("system", "Be brief.") + turn("user", "Hi") + kAnswer);
  EXPECT_EQ(chat.render({{"system", "S"}, {"user", "A"}, {"assistant", "B"}, {"user", "C"}}),
            turn("system", "S") + turn("user", "A") + turn("assistant", "B") + turn("user", "C") +
                kAnswer);
}

TEST(ChatTemplate, LetsTheTemplateAddASystemMessageOfItsOwn) {
  EXPECT_EQ(ChatTemplate(test_model()).render({{"user", "Hi"}}),
            kOwnSystem + turn("user", "Hi") + kAnswer);
}

TEST(ChatTemplate, OpensTheAssistantsAnswerOnlyWhenAsked) {
  EXPECT_EQ(ChatTemplate(test_model()).render({{"system", "S"}, {"user", "U"}}, false),
            turn("system", "S") + turn("user", "U"));
}

TEST(ChatTemplate, WorksWithoutTheWeightsAndOutlivesTheModel) {
  const char* path = std::getenv("MORPHKV_TEST_MODEL");
  ModelPtr vocabulary = llama_cpp::load_model(path, {.vocab_only = true, .progress = {}});
  ChatTemplate made(vocabulary.get());
  vocabulary.reset();
  const ChatTemplate moved = std::move(made);
  EXPECT_EQ(moved.render({{"user", "Hi"}}), kOwnSystem + turn("user", "Hi") + kAnswer);
}

TEST(ChatTemplate, LeavesTheTextOfAMessageAsItIs) {
  const ChatTemplate chat(test_model());
  for (const std::string text :
       {"{{ messages }} {% if x %} {# y #} }}", "", " \n two spaces  ", "\\n \"q\" 'q' <|im_end|>",
        "h\xC3\xA9 \xE2\x9C\x93 \xF0\x9F\x99\x82", "\xFF half of a character \xC3",
        "{'role': 'system'}"}) {
    EXPECT_EQ(chat.render({{"system", text}, {"user", text}}),
              turn("system", text) + turn("user", text) + kAnswer);
  }
}

TEST(ChatTemplate, RendersOnSeveralThreadsAtOnce) {
  const ChatTemplate chat(test_model());
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, name = std::to_string(t)] {
      for (int i = 0; i < 50; ++i) {
        const std::string text = name + "-" + std::to_string(i);
        if (chat.render({{"system", name}, {"user", text}}) !=
            turn("system", name) + turn("user", text) + kAnswer)
          ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

// --- Other templates ------------------------------------------------------------------------

TEST(ChatTemplate, RefusesInTheWordsOfTheTemplate) {
  const ModelPtr model = model_with(
      "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
      "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}"
      "{{ m.role + ':' + m.content + ';' }}{% endfor %}");
  const ChatTemplate chat(model.get());
  EXPECT_EQ(chat.render({{"user", "a"}, {"assistant", "b"}}), "user:a;assistant:b;");
  const std::string text = refusal<std::invalid_argument>([&] {
    (void)chat.render({{"user", "a"}, {"user", "b"}});
  });
  EXPECT_EQ(text,
            "the model's chat template refuses the messages: Roles must alternate user/assistant");
  EXPECT_EQ(chat.render({{"user", "still works"}}), "user:still works;");
}

TEST(ChatTemplate, SaysOnOneLineWhatTheTemplateCannotDo) {
  const ModelPtr model = model_with("{{ messages[0].content | no_such_filter }}");
  const ChatTemplate chat(model.get());
  const std::string text = refusal<std::invalid_argument>([&] {
    (void)chat.render({{"user", "a"}});
  });
  EXPECT_TRUE(has(text, "no_such_filter")) << text;
  EXPECT_FALSE(has(text, "\n")) << text;
}

TEST(ChatTemplate, RefusesAModelWithoutOneOrWithOneThatCannotBeParsed) {
  const ModelPtr none = make_tiny_model({});
  EXPECT_TRUE(has(refusal<BadModelFile>([&] { ChatTemplate chat(none.get()); }), "no chat"));
  for (const char* broken : {"{% for m in %}", "{{ 'open", "{% if true %}no end", "{{ ( }}"}) {
    const ModelPtr model = model_with(broken);
    const std::string text = refusal<BadModelFile>([&] { ChatTemplate chat(model.get()); });
    EXPECT_TRUE(has(text, "cannot be parsed")) << broken << ": " << text;
    EXPECT_TRUE(has(text, "--chat")) << text;
    EXPECT_FALSE(has(text, "\n")) << text;
  }
}

TEST(ChatTemplate, LeavesTheStartTokenToTheTokenizerThatAddsIt) {
  const std::string source = "{{ bos_token + messages[0].content + eos_token }}";
  const ModelPtr adds = model_with(source, true);
  EXPECT_EQ(ChatTemplate(adds.get()).render({{"user", "text"}}), "text");
  const ModelPtr does_not = model_with(source, false);
  const std::string bos = llama_cpp::token_text(does_not.get(), 7, true);
  ASSERT_FALSE(bos.empty());
  EXPECT_EQ(ChatTemplate(does_not.get()).render({{"user", "text"}}), bos + "text");
}

TEST(ChatTemplate, BeginsTheNextMessageWithASystemMessageThatHasNoPlaceOfItsOwn) {
  const ModelPtr model = model_with(
      "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
      "{% endif %}{{ m.role + ':' + m.content + ';' }}{% endfor %}");
  const ChatTemplate chat(model.get());
  EXPECT_EQ(chat.render({{"system", "S"}, {"user", "U"}}), "user:S\nU;");
  EXPECT_TRUE(has(refusal<std::invalid_argument>([&] {
                    (void)chat.render({{"system", "S"}});
                  }),
                  "no system"));
}

TEST(ChatTemplate, GivesTextInPartsToATemplateThatWantsIt) {
  const ModelPtr model = model_with(
      "{% for m in messages %}{% for p in m['content'] %}{% if p['type'] == 'text' %}"
      "{{ m['role'] + ':' + p['text'] + ';' }}{% endif %}{% endfor %}{% endfor %}");
  EXPECT_EQ(ChatTemplate(model.get()).render({{"user", "a"}, {"assistant", "b"}}),
            "user:a;assistant:b;");
}

TEST(ChatTemplate, WritesNothingToTheTerminal) {
  const ModelPtr model = model_with("{{ bos_token }}{{ raise_exception('no') }}");
  const ModelPtr broken = model_with("{% for %}");
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  (void)ChatTemplate(test_model()).render({{"user", "Hi"}});
  (void)refusal<std::invalid_argument>([&] {
    (void)ChatTemplate(model.get()).render({{"user", "Hi"}});
  });
  (void)refusal<BadModelFile>([&] { ChatTemplate chat(broken.get()); });
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

}  // namespace
}  // namespace morphkv::test
