#include "morphkv/file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <iterator>
#include <stdexcept>
#include <string>

namespace morphkv {
namespace {

namespace fs = std::filesystem;

class File : public testing::Test {
 protected:
  File()
      : folder_(fs::temp_directory_path() /
                ("morphkv-file-" + std::to_string(getpid()) + "-" +
                 testing::UnitTest::GetInstance()->current_test_info()->name())) {
    fs::create_directories(folder_);
  }
  ~File() override { fs::remove_all(folder_); }
  std::string path(const std::string& name = "file") const { return (folder_ / name).string(); }
  std::ptrdiff_t files() const { return std::distance(fs::directory_iterator(folder_), {}); }

  template <typename Call>
  static std::string failure(const Call& call) {
    try {
      call();
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    ADD_FAILURE() << "no error";
    return "";
  }

 private:
  fs::path folder_;
};

TEST_F(File, ComesBackByteByByte) {
  std::string bytes(3'000'001, 'x');
  bytes[0] = '\0';
  bytes.back() = '\n';
  for (const std::string& written : {std::string(), std::string("a\0b", 3), bytes}) {
    write_file_atomically(path(), written);
    EXPECT_EQ(read_file(path()), written);
    EXPECT_EQ(files(), 1);
  }
}

TEST_F(File, IsReadUpToItsLimit) {
  write_file_atomically(path(), "12345");
  EXPECT_EQ(read_file(path(), 5), "12345");
  EXPECT_NE(failure([&] { read_file(path(), 4); }).find("more than 4 bytes"), std::string::npos);
  EXPECT_NE(failure([&] { read_file("/dev/zero", 1000); }).find("more than 1000 bytes"),
            std::string::npos);
}

TEST_F(File, ThatCannotBeReadIsNamedWithTheReason) {
  const std::string text = failure([&] { read_file(path("none")); });
  EXPECT_NE(text.find(path("none")), std::string::npos);
  EXPECT_NE(text.find("No such file"), std::string::npos) << text;
  fs::create_directory(path("folder"));
  EXPECT_NE(failure([&] { read_file(path("folder")); }).find("directory"), std::string::npos);
}

TEST_F(File, ThatCannotBeWrittenIsNamedWithTheReasonAndLeavesNothing) {
  fs::create_directory(path("folder"));
  EXPECT_NE(failure([&] { write_file_atomically(path("folder"), "x"); }).find("directory"),
            std::string::npos);
  const std::string text = failure([&] { write_file_atomically(path("none/file"), "x"); });
  EXPECT_NE(text.find("No such file"), std::string::npos) << text;
  EXPECT_NE(failure([&] { write_file_atomically(path(std::string(300, 'x')), "x"); }), "");
  EXPECT_EQ(files(), 1);
}

TEST_F(File, ReplacesNoDevice) {
  EXPECT_NE(failure([&] { write_file_atomically("/dev/null", "x"); }).find("no regular file"),
            std::string::npos);
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  EXPECT_NE(failure([&] { write_file_atomically(path("pipe"), "x"); }), "");
  EXPECT_TRUE(fs::is_fifo(path("pipe")));
}

TEST_F(File, StaysAsItWasOnAFullDisk) {
  write_file_atomically(path(), "old");
  rlimit limit{};
  getrlimit(RLIMIT_FSIZE, &limit);
  const rlimit little{100, limit.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &little);
  const std::string text = failure([&] { write_file_atomically(path(), std::string(1000, 'x')); });
  setrlimit(RLIMIT_FSIZE, &limit);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(text.find("free space"), std::string::npos) << text;
  EXPECT_EQ(read_file(path()), "old");
  EXPECT_EQ(files(), 1);
}

TEST_F(File, HasTheUsualPermissionsAndTakesNoNameInUse) {
  const mode_t mask = umask(022);
  write_file_atomically(path(), "x");
  umask(mask);
  EXPECT_EQ(fs::status(path()).permissions(), fs::perms{0644});
  write_file_atomically(path("file.tmp"), "other");
  write_file_atomically(path(), "new");
  EXPECT_EQ(read_file(path("file.tmp")), "other");
}

}  // namespace
}  // namespace morphkv
