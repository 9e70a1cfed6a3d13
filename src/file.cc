#include "morphkv/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace morphkv {
namespace {

constexpr std::size_t kChunk = std::size_t{1} << 20;

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() { close(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  // Some file systems tell only now that a write has failed.
  bool close() { return fd_ < 0 || ::close(std::exchange(fd_, -1)) == 0; }

 private:
  int fd_;
};

std::string reason() { return std::generic_category().message(errno); }

[[noreturn]] void refuse_write(const std::string& path, const std::string& why) {
  throw std::runtime_error("file '" + path + "' cannot be written: " + why +
                           "; check its folder, permissions and free space");
}

[[noreturn]] void refuse_read(const std::string& path, const std::string& why) {
  throw std::runtime_error("file '" + path + "' cannot be read: " + why);
}

// In the same folder, so that it can be renamed; of a length that does not depend on the name.
std::string temporary_name(const std::string& path) {
  static std::atomic<unsigned> count = 0;
  const std::string name =
      ".morphkv-" + std::to_string(getpid()) + "-" + std::to_string(count++) + ".tmp";
  return (std::filesystem::path(path).parent_path() / name).string();
}

bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), std::min(bytes.size(), kChunk));
    if (n < 0 && errno != EINTR) return false;
    if (n > 0) bytes.remove_prefix(static_cast<std::size_t>(n));
  }
  return true;
}

bool sync(int fd) {
  int status = 0;
  do {
    status = ::fsync(fd);
  } while (status != 0 && errno == EINTR);
  return status == 0 || errno == EINVAL || errno == ENOTSUP;  // nothing there that could be synced
}

}  // namespace

void write_file_atomically(const std::string& path, std::string_view bytes) {
  std::error_code ignored;
  const auto status = std::filesystem::status(path, ignored);
  if (std::filesystem::is_directory(status)) refuse_write(path, "it is a directory");
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
    refuse_write(path, "it is no regular file");  // a device must not be renamed away
  }
  std::string temporary;
  int fd = -1;
  do {  // a name may be left over from a process that crashed
    temporary = temporary_name(path);
    fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (fd < 0 && errno == EEXIST);
  if (fd < 0) refuse_write(path, reason());
  Descriptor file(fd);
  const bool written = write_all(fd, bytes) && sync(fd) && file.close();
  if (written && std::rename(temporary.c_str(), path.c_str()) == 0) return;
  const std::string why = reason();
  ::unlink(temporary.c_str());
  refuse_write(path, why);
}

std::string read_file(const std::string& path, std::uint64_t most_bytes) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) refuse_read(path, reason());
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) refuse_read(path, reason());
  const bool regular = S_ISREG(info.st_mode);
  std::string bytes;
  if (regular) {
    bytes.reserve(
        static_cast<std::size_t>(std::min(static_cast<std::uint64_t>(info.st_size), most_bytes)));
  }
  for (;;) {
    const std::size_t had = bytes.size();
    bytes.resize(had + kChunk);
    const ssize_t n = ::read(file.get(), bytes.data() + had, kChunk);
    const int error = errno;
    bytes.resize(had + static_cast<std::size_t>(std::max<ssize_t>(n, 0)));
    if (n == 0) return bytes;
    if (n < 0 && error != EINTR) {
      errno = error;
      refuse_read(path, reason());
    }
    if (bytes.size() > most_bytes) {
      refuse_read(path, "it has more than " + std::to_string(most_bytes) + " bytes");
    }
  }
}

}  // namespace morphkv
