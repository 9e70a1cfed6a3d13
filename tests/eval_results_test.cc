// The file of trials: what comes back, what is dropped, and what is refused and left alone.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>

#include "eval_samples.h"
#include "results.h"

namespace morphkv::eval {
namespace {

namespace fs = std::filesystem;

class ResultsFile : public testing::Test {
 protected:
  void SetUp() override {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::path(testing::TempDir()) /
              ("eval_results." + std::to_string(getpid()) + "." + test->name());
    fs::create_directories(folder_);
    path_ = folder_ / "trials.jsonl";
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string content() const {
    if (!fs::is_regular_file(path_)) return "";
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void replace_content(const std::string& text) const {
    std::ofstream(path_, std::ios::binary) << text;
  }
  // A file with the trials of documents 0 to `count` - 1.
  void write_trials(int count) const {
    Results results(path_, sample_info());
    for (int d = 0; d < count; ++d) results.add(sample_trial("morphkv", 256, d, 0, 0.5));
  }
  // Opening throws `Error` with all of `parts` in its text and changes nothing.
  template <class Error>
  void expect_refused(const RunInfo& info, std::initializer_list<const char*> parts) const {
    const std::string before = content();
    try {
      Results results(path_, info);
      ADD_FAILURE() << "opened";
    } catch (const Error& error) {
      for (const char* part : parts) {
        EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
      }
      EXPECT_NE(std::string(error.what()).find(path_), std::string::npos) << error.what();
    }
    EXPECT_EQ(content(), before) << "the file was changed";
  }

  fs::path folder_;
  std::string path_;
};

TEST_F(ResultsFile, GivesBackEveryFieldOfATrial) {
  Trial trial = sample_trial("morphkv window=32 pool=7", 256, 3, 2, 1.0 / 3.0);
  trial.measures = {{"nll", 1e-300}, {"kl", 123456.789}};
  trial.text = "caf\xC3\xA9 \"quoted\"\n{\"task\":\"";
  trial.depth = 0.1;
  trial.prompt_tokens = 4100;
  trial.tokens_judged = 9;
  trial.rows_kept = 255;
  trial.kv_bytes_kept = 5'000'000'000;
  trial.kv_bytes_allocated = 6'000'000'000;
  trial.read_ms = 1234.5;
  trial.step_ms = 0.1;
  trial.evict_ms = 0.7;
  trial.threads = 16;
  Results(path_, sample_info()).add(trial);

  const Results results = Results::read(path_);
  ASSERT_EQ(results.trials().size(), 1u);
  const Trial& read = results.trials()[0];
  EXPECT_EQ(read.key, trial.key);
  EXPECT_EQ(read.score, trial.score) << "to the last bit";
  EXPECT_EQ(read.measures, trial.measures);
  EXPECT_EQ(read.text, trial.text);
  EXPECT_EQ(read.depth, trial.depth);
  EXPECT_EQ(read.prompt_tokens, trial.prompt_tokens);
  EXPECT_EQ(read.tokens_judged, trial.tokens_judged);
  EXPECT_EQ(read.rows_kept, trial.rows_kept);
  EXPECT_EQ(read.kv_bytes_kept, trial.kv_bytes_kept);
  EXPECT_EQ(read.kv_bytes_allocated, trial.kv_bytes_allocated);
  EXPECT_EQ(read.read_ms, trial.read_ms);
  EXPECT_EQ(read.step_ms, trial.step_ms);
  EXPECT_EQ(read.evict_ms, trial.evict_ms);
  EXPECT_EQ(read.threads, trial.threads);
}

TEST_F(ResultsFile, GivesBackWhatTheRunIs) {
  RunInfo info = sample_info();
  info.seed = std::numeric_limits<std::uint64_t>::max();
  const Results written(path_, info);
  const Results results = Results::read(path_);
  EXPECT_EQ(results.info().model, info.model);
  EXPECT_EQ(results.info().model_fingerprint, info.model_fingerprint);
  EXPECT_EQ(results.info().model_description, info.model_description);
  EXPECT_EQ(results.info().version, info.version);
  EXPECT_EQ(results.info().engine, info.engine);
  EXPECT_EQ(results.info().cpu, info.cpu);
  EXPECT_EQ(results.info().seed, info.seed);
}

TEST_F(ResultsFile, IsOnDiskAsSoonAsATrialIsAdded) {
  Results results(path_, sample_info());
  results.add(sample_trial("full", 0, 0, 0, 1.0));
  EXPECT_EQ(Results::read(path_).trials().size(), 1u) << "while the first is still open";
}

TEST_F(ResultsFile, ResumesWhereARunEnded) {
  write_trials(2);
  const std::string before = content();
  {
    Results results(path_, sample_info());
    EXPECT_EQ(results.trials().size(), 2u);
    EXPECT_TRUE(results.has(sample_trial("morphkv", 256, 1, 0, 0.0).key));
    EXPECT_FALSE(results.has(sample_trial("morphkv", 256, 2, 0, 0.0).key));
    EXPECT_EQ(content(), before) << "opening writes nothing";
    results.add(sample_trial("morphkv", 256, 2, 0, 0.5));
  }
  EXPECT_TRUE(content().starts_with(before));
  EXPECT_EQ(Results::read(path_).trials().size(), 3u);
}

TEST_F(ResultsFile, ResumesUnderAnotherNameAndVersionOfTheSameModel) {
  write_trials(1);
  RunInfo info = sample_info();
  info.model = "renamed.gguf";
  info.version = "9.9.9";
  const Results results(path_, info);
  EXPECT_EQ(results.trials().size(), 1u);
  EXPECT_EQ(results.info().version, sample_info().version) << "of the file";
}

TEST_F(ResultsFile, DropsALineThatWasCutOffAnywhere) {
  write_trials(2);
  const std::string whole = content();
  const std::size_t last = whole.rfind('\n', whole.size() - 2) + 1;
  for (std::size_t size = last; size < whole.size(); ++size) {
    replace_content(whole.substr(0, size));
    EXPECT_EQ(Results::read(path_).trials().size(), 1u) << size;
    EXPECT_EQ(content().size(), size) << "reading changes nothing";
    Results results(path_, sample_info());
    EXPECT_EQ(content(), whole.substr(0, last)) << size;
    results.add(sample_trial("morphkv", 256, 1, 0, 0.5));
    EXPECT_EQ(content(), whole) << size;
  }
}

TEST_F(ResultsFile, BeginsAnewAfterAFirstLineThatWasCutOff) {
  write_trials(0);
  const std::string header = content();
  for (std::size_t size = 0; size < header.size(); ++size) {
    replace_content(header.substr(0, size));
    const Results results(path_, sample_info());
    EXPECT_EQ(content(), header) << size;
  }
}

TEST_F(ResultsFile, RefusesAForeignFileAndLeavesItAlone) {
  for (const char* text : {"Dear diary,\n", "no line end", "{\"a\": 1}\n", "[1]\n{}\n", "\n",
                           "{\"morphkv_eval\":1,\"model\":\"other"}) {
    replace_content(text);
    expect_refused<std::runtime_error>(sample_info(), {"line 1", "no results", "give the path"});
  }
}

TEST_F(ResultsFile, RefusesAnUnknownFormat) {
  write_trials(1);
  std::string text = content();
  text.replace(text.find("\"morphkv_eval\":1"), 16, "\"morphkv_eval\":2");
  replace_content(text);
  expect_refused<std::runtime_error>(sample_info(), {"line 1", "format 2"});
}

TEST_F(ResultsFile, RefusesAnotherModelOrSeed) {
  write_trials(1);
  RunInfo info = sample_info();
  info.seed = 8;
  expect_refused<std::invalid_argument>(info, {"line 1", "seed is 7, not 8"});
  info = sample_info();
  info.model_fingerprint = "def456";
  expect_refused<std::invalid_argument>(info, {"line 1", "abc123", "def456"});
}

TEST_F(ResultsFile, RefusesAnotherModelEvenWhenALineWasCutOff) {
  write_trials(2);
  replace_content(content().substr(0, content().size() - 5));
  RunInfo info = sample_info();
  info.seed = 8;
  expect_refused<std::invalid_argument>(info, {"seed"});
}

TEST_F(ResultsFile, TellsModelsWithoutAHashApartByName) {
  RunInfo info = sample_info();
  info.model_fingerprint.clear();
  { const Results results(path_, info); }
  EXPECT_NO_THROW(Results(path_, info));
  info.model = "other.gguf";
  expect_refused<std::invalid_argument>(info, {"other.gguf"});
}

TEST_F(ResultsFile, RefusesABrokenLineByItsNumber) {
  write_trials(2);
  const std::string whole = content();
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = whole;
    text.replace(text.find(from), from.size(), to);
    replace_content(text);
  };
  with("\"document\":0", "\"document\":");
  expect_refused<std::runtime_error>(sample_info(), {"line 2", "delete this line"});
  with("\"document\":0", "\"document\":\"0\"");
  expect_refused<std::runtime_error>(sample_info(), {"line 2", "\"document\"", "whole number"});
  with("\"document\":0", "\"document\":3000000000");
  expect_refused<std::runtime_error>(sample_info(), {"line 2", "\"document\"", "3000000000"});
  with("\"document\":0,", "");
  expect_refused<std::runtime_error>(sample_info(), {"line 2", "has no \"document\""});
  with("\"score\":0.5", "\"score\":null");
  expect_refused<std::runtime_error>(sample_info(), {"line 2", "\"score\"", "null"});
  with("\"document\":1", "\"document\":0");
  expect_refused<std::runtime_error>(sample_info(), {"line 3", "second trial", "delete one"});
  replace_content(whole + "\n");
  expect_refused<std::runtime_error>(sample_info(), {"line 4"});
  replace_content(whole + "what is this");
  expect_refused<std::runtime_error>(sample_info(), {"line 4", "nor the beginning of one"});
}

TEST_F(ResultsFile, RefusesAKeyThatIsThere) {
  Results results(path_, sample_info());
  results.add(sample_trial("morphkv", 256, 0, 0, 0.5));
  const std::string before = content();
  EXPECT_THROW(results.add(sample_trial("morphkv", 256, 0, 0, 0.6)), std::logic_error);
  EXPECT_EQ(content(), before);
  EXPECT_EQ(results.trials().size(), 1u);
}

TEST_F(ResultsFile, RefusesNumbersThatAreNotFinite) {
  Results results(path_, sample_info());
  const std::string before = content();
  for (const double bad : {std::numeric_limits<double>::infinity(), std::nan("")}) {
    EXPECT_THROW(results.add(sample_trial("morphkv", 256, 0, 0, bad)), std::invalid_argument);
    Trial trial = sample_trial("morphkv", 256, 0, 0, 0.5);
    trial.measures["kl"] = bad;
    try {
      results.add(trial);
      ADD_FAILURE() << "added";
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find("\"kl\""), std::string::npos) << error.what();
    }
  }
  EXPECT_EQ(content(), before);
  results.add(sample_trial("morphkv", 256, 0, 0, 0.5));
  EXPECT_EQ(Results::read(path_).trials().size(), 1u) << "the store goes on";
}

TEST_F(ResultsFile, ReplacesWhatIsNoUtf8InTheTextAndRefusesItInNames) {
  Results results(path_, sample_info());
  Trial trial = sample_trial("morphkv", 256, 0, 0, 0.5);
  trial.text = "cut \xE2\x82";
  results.add(trial);
  EXPECT_EQ(Results::read(path_).trials()[0].text, "cut \xEF\xBF\xBD");
  EXPECT_THROW(results.add(sample_trial("arm \xFF", 256, 0, 0, 0.5)), std::invalid_argument);
  EXPECT_EQ(Results::read(path_).trials().size(), 1u);
}

TEST_F(ResultsFile, IsNotWrittenAfterRead) {
  write_trials(2);
  replace_content(content().substr(0, content().size() - 5));
  const std::string before = content();
  Results results = Results::read(path_);
  EXPECT_THROW(results.add(sample_trial("morphkv", 256, 9, 0, 0.5)), std::logic_error);
  EXPECT_EQ(content(), before);
}

TEST_F(ResultsFile, EndsWithTheLineBeforeWhenTheDiskIsFull) {
  Results results(path_, sample_info());
  results.add(sample_trial("morphkv", 256, 0, 0, 0.5));
  const std::string before = content();
  rlimit limit{};
  getrlimit(RLIMIT_FSIZE, &limit);
  const rlimit full = {before.size() + 10, limit.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &full);
  EXPECT_THROW(results.add(sample_trial("morphkv", 256, 1, 0, 0.5)), std::runtime_error);
  setrlimit(RLIMIT_FSIZE, &limit);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(content(), before);
  EXPECT_FALSE(results.has(sample_trial("morphkv", 256, 1, 0, 0.5).key));
  EXPECT_THROW(results.add(sample_trial("morphkv", 256, 1, 0, 0.5)), std::logic_error) << "closed";
  EXPECT_EQ(content(), before);
  Results(path_, sample_info()).add(sample_trial("morphkv", 256, 1, 0, 0.5));
  EXPECT_EQ(Results::read(path_).trials().size(), 2u);
}

TEST_F(ResultsFile, NamesAPathThatCannotBeOpened) {
  EXPECT_THROW(Results::read(path_), std::runtime_error) << "there is no file";
  EXPECT_FALSE(fs::exists(path_));
  path_ = folder_ / "missing" / "trials.jsonl";
  expect_refused<std::runtime_error>(sample_info(), {"cannot create"});
  path_ = folder_;
  expect_refused<std::runtime_error>(sample_info(), {"no regular file"});
}

}  // namespace
}  // namespace morphkv::eval
