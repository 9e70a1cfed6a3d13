// The record of a run: its derived values, and the file that a reader never sees half of.
#include "run_record.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

namespace morphkv::cli {
namespace {

namespace fs = std::filesystem;

RunRecord sample() {
  RunRecord record;
  record.model = "model.gguf";
  record.options.cache = {.budget = 512, .n_sink = 4, .window = 8, .recent = 0, .pool = 7};
  auto& result = record.result;
  result.finish_reason = llama_cpp::FinishReason::kLength;
  result.prompt_tokens = 1000;
  result.generated_tokens = 50;
  result.decode_ms = 500.0;
  result.cache.tokens_seen = 1049;
  result.cache.rows_kept = 512;
  result.cache.rows_evicted = 537;
  result.cache.kv_bytes_kept = 11796480;
  result.cache.kv_bytes_full = 24168960;
  record.text = "caf\xC3\xA9 \"quoted\"\n";
  return record;
}

nlohmann::json parsed(const RunRecord& record) { return nlohmann::json::parse(to_json(record)); }

TEST(RunRecord, DerivesWhatItDoesNotMeasure) {
  const auto json = parsed(sample());
  EXPECT_DOUBLE_EQ(json.at("compression_ratio"), 24168960.0 / 11796480.0);
  EXPECT_DOUBLE_EQ(json.at("tokens_per_second"), 100.0);
  EXPECT_EQ(json.at("recent"), 8) << "the protected tail as used";
  EXPECT_EQ(json.at("finish_reason"), "length");
  EXPECT_EQ(json.at("text"), "caf\xC3\xA9 \"quoted\"\n");
}

TEST(RunRecord, OfARunThatDidNothingHasNumbersEverywhere) {
  const RunRecord nothing;
  const auto json = parsed(nothing);
  EXPECT_DOUBLE_EQ(json.at("compression_ratio"), 1.0);
  EXPECT_DOUBLE_EQ(json.at("tokens_per_second"), 0.0);
  for (const auto& [name, value] : json.items()) EXPECT_FALSE(value.is_null()) << name;
}

TEST(RunRecord, IsValidJsonForAPathThatIsNoUtf8) {
  RunRecord record = sample();
  record.model = "mod\xE9l.gguf";
  EXPECT_EQ(parsed(record).at("model"), "mod\xEF\xBF\xBDl.gguf");
}

TEST(RunRecord, TableNamesTheFiguresOfTheRecord) {
  const std::string table = to_table(sample());
  for (const char* part :
       {"1000 tokens", "50 tokens", "100.0 tokens/s", "(length)", "512 rows per KV head",
        "537 rows evicted", "11.25 MiB kept", "23.05 MiB if nothing were evicted, 2.0 times"}) {
    EXPECT_NE(table.find(part), std::string::npos) << part << " is not in\n" << table;
  }
}

class RecordFile : public testing::Test {
 protected:
  RecordFile() : folder_(fs::path(testing::TempDir()) / ("morphkv_record_" + unique())) {
    fs::create_directory(folder_);
  }
  ~RecordFile() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  static std::string content(const std::string& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }
  std::ptrdiff_t files() const {
    return std::distance(fs::directory_iterator(folder_), fs::directory_iterator());
  }

 private:
  static std::string unique() {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    return std::string(test->name()) +
           std::to_string(testing::UnitTest::GetInstance()->start_timestamp());
  }
  fs::path folder_;
};

TEST_F(RecordFile, ReplacesAnOlderOneAndLeavesNothingElse) {
  write_file(path("a.json"), "old");
  write_file(path("a.json"), "new");
  EXPECT_EQ(content(path("a.json")), "new");
  EXPECT_EQ(files(), 1);
}

TEST_F(RecordFile, IsNotTouchedByTheQuestionWhetherItCanBeWritten) {
  require_writable(path("a.json"));
  EXPECT_EQ(files(), 0);
  write_file(path("a.json"), "old");
  require_writable(path("a.json"));
  EXPECT_EQ(content(path("a.json")), "old");
  EXPECT_EQ(files(), 1);
}

TEST_F(RecordFile, IsRefusedWhereNoneCanBe) {
  EXPECT_THROW(require_writable(""), std::invalid_argument);
  EXPECT_THROW(require_writable(path("")), std::invalid_argument);
  EXPECT_THROW(require_writable(path("none/a.json")), std::invalid_argument);
  EXPECT_THROW(require_writable(path(std::string(300, 'x'))), std::invalid_argument);
  EXPECT_THROW(write_file(path("none/a.json"), "text"), std::runtime_error);
}

TEST_F(RecordFile, IsWrittenIntoAPipeAndNotOverIt) {
  const std::string pipe = path("pipe");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const int reader = open(pipe.c_str(), O_RDONLY | O_NONBLOCK);
  ASSERT_GE(reader, 0);
  require_writable(pipe);
  write_file(pipe, "text");
  char text[8] = {};
  EXPECT_EQ(read(reader, text, sizeof text), 4);
  close(reader);
  EXPECT_STREQ(text, "text");
  EXPECT_TRUE(fs::is_fifo(pipe));
  EXPECT_EQ(files(), 1);
}

}  // namespace
}  // namespace morphkv::cli
