// Keys of the server: which files are refused, and who gets in.
#include "api_keys.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <stdexcept>

namespace morphkv::server {
namespace {

class KeyFile {
 public:
  explicit KeyFile(const std::string& text)
      : path_(std::filesystem::temp_directory_path() /
              ("morphkv-keys-" +
               std::string(::testing::UnitTest::GetInstance()->current_test_info()->name()))) {
    std::ofstream(path_, std::ios::binary) << text;
  }
  ~KeyFile() { std::filesystem::remove(path_); }
  KeyFile(const KeyFile&) = delete;
  KeyFile& operator=(const KeyFile&) = delete;
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

std::string refusal_of(const std::string& path) {
  try {
    static_cast<void>(ApiKeys::read(path));
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(ApiKeys, LetEverybodyInWhenThereAreNone) {
  EXPECT_TRUE(ApiKeys().allow(""));
  EXPECT_TRUE(ApiKeys().allow("Bearer whatever"));
}

TEST(ApiKeys, LetInWhoNamesOneOfThemAndNobodyElse) {
  const KeyFile file("# of the harbour\nfirst-key-1\r\n\nsecond-key-22  \n");
  const ApiKeys keys = ApiKeys::read(file.path());
  EXPECT_TRUE(keys.allow("Bearer first-key-1"));
  EXPECT_TRUE(keys.allow("Bearer second-key-22"));
  for (const char* wrong :
       {"", "Bearer", "Bearer ", "first-key-1", "Basic first-key-1", "Bearer first-key-",
        "Bearer first-key-11", "Bearer first-key-1 ", "Bearer  first-key-1", "Bearer FIRST-KEY-1",
        "Bearer # of the harbour", "Bearer second-key-22second-key-22"}) {
    EXPECT_FALSE(keys.allow(wrong)) << wrong;
  }
}

TEST(ApiKeys, RefuseAFileThatCannotBeMeantAndNeverShowAKey) {
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"", "has no key"},
      {"# only a remark\n\n", "has no key"},
      {"good-key-123\nshort\n", "line 2"},
      {"secret key with spaces\n", "line 1"},
      {"secret-\xC3\xA4-umlaut\n", "line 1"},
      {std::string("secret\0key-99", 13), "line 1"},
  };
  for (const auto& [text, expected] : bad) {
    const KeyFile file(text);
    const std::string why = refusal_of(file.path());
    EXPECT_NE(why.find(expected), std::string::npos) << why;
    EXPECT_NE(why.find("--api-key-file"), std::string::npos) << why;
    for (const char* secret : {"secret", "short", "good"}) {
      EXPECT_EQ(why.find(secret), std::string::npos) << why;
    }
  }
  EXPECT_NE(refusal_of("/nowhere/at/all").find("cannot be read"), std::string::npos);
}

}  // namespace
}  // namespace morphkv::server
