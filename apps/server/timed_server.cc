#include "timed_server.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <string>

namespace morphkv::server {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kStopCheck{50};   // between two looks whether the server stops
constexpr milliseconds kLastBytes{100};  // that a client may still send while it is let go
constexpr std::size_t kMostLastBytes = 1u << 20;

// Whether the socket is ready for `events` before `deadline`.
bool ready(socket_t socket, short events, Clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now()).count();
    pollfd entry{.fd = socket, .events = events, .revents = 0};
    const int n = ::poll(&entry, 1, static_cast<int>(std::max<std::int64_t>(left, 0)));
    if (n >= 0 || errno != EINTR) return n > 0;
    if (left <= 0) return false;
  }
}

ssize_t receive(socket_t socket, char* to, std::size_t size, int flags = 0) {
  while (true) {
    const ssize_t n = ::recv(socket, to, size, flags);
    if (n >= 0 || errno != EINTR) return n;
  }
}

using NameOf = int (*)(int, sockaddr*, socklen_t*);

void address(socket_t socket, NameOf name_of, std::string& ip, int& port) {
  sockaddr_storage name{};
  socklen_t length = sizeof(name);
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> service{};
  auto* generic = reinterpret_cast<sockaddr*>(&name);
  if (name_of(socket, generic, &length) != 0 ||
      ::getnameinfo(generic, length, host.data(), host.size(), service.data(), service.size(),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return;
  }
  ip = host.data();
  std::from_chars(service.data(), service.data() + std::strlen(service.data()), port);
}

// A request on its way in and its answer on its way out.
class TimedStream : public httplib::Stream {
 public:
  TimedStream(socket_t socket, Clock::time_point deadline, milliseconds write_timeout)
      : socket_(socket), deadline_(deadline), write_timeout_(write_timeout) {}

  bool is_readable() const override { return begin_ < end_; }
  bool wait_readable() const override { return ready(socket_, POLLIN, deadline_); }
  bool wait_writable() const override {
    return ready(socket_, POLLOUT, Clock::now() + write_timeout_);
  }
  bool is_peer_alive() const override {
    char byte = 0;
    return !ready(socket_, POLLIN, Clock::now()) || receive(socket_, &byte, 1, MSG_PEEK) > 0;
  }

  ssize_t read(char* to, std::size_t size) override {
    if (begin_ == end_) {
      if (!wait_readable()) {
        error_ = httplib::Error::Timeout;
        return -1;
      }
      const ssize_t n = receive(socket_, buffer_.data(), buffer_.size());
      if (n <= 0) {
        error_ = n == 0 ? httplib::Error::ConnectionClosed : httplib::Error::Read;
        return n;
      }
      begin_ = 0;
      end_ = static_cast<std::size_t>(n);
    }
    const std::size_t n = std::min(size, end_ - begin_);
    std::memcpy(to, buffer_.data() + begin_, n);
    begin_ += n;
    return static_cast<ssize_t>(n);
  }
  ssize_t write(const char* from, std::size_t size) override {
    return wait_writable() ? ::send(socket_, from, size, MSG_NOSIGNAL) : -1;
  }
  const char* buffered_data(std::size_t& size) const override {
    size = end_ - begin_;
    return size > 0 ? buffer_.data() + begin_ : nullptr;
  }
  void consume_buffered(std::size_t size) override { begin_ += std::min(size, end_ - begin_); }

  void get_remote_ip_and_port(std::string& ip, int& port) const override {
    address(socket_, ::getpeername, ip, port);
  }
  void get_local_ip_and_port(std::string& ip, int& port) const override {
    address(socket_, ::getsockname, ip, port);
  }
  socket_t socket() const override { return socket_; }
  time_t duration() const override { return 0; }

 private:
  socket_t socket_;
  Clock::time_point deadline_;
  milliseconds write_timeout_;
  std::array<char, 4096> buffer_{};
  std::size_t begin_ = 0;  // of what was received and not read yet
  std::size_t end_ = 0;
};

// What still comes is read, for a while: closed before that, the client may lose the answer.
void close_gently(socket_t socket) {
  ::shutdown(socket, SHUT_WR);
  std::array<char, 4096> rest{};
  std::size_t bytes = 0;
  for (const auto deadline = Clock::now() + kLastBytes;
       bytes < kMostLastBytes && ready(socket, POLLIN, deadline);) {
    const ssize_t n = receive(socket, rest.data(), rest.size());
    if (n <= 0) break;
    bytes += static_cast<std::size_t>(n);
  }
  ::close(socket);
}

}  // namespace

// Several requests may come on one connection, one after another.
bool TimedServer::wait_for_request(socket_t socket) const {
  const auto deadline = Clock::now() + std::chrono::seconds(keep_alive_timeout_sec_);
  while (svr_sock_ != INVALID_SOCKET && Clock::now() < deadline) {
    if (ready(socket, POLLIN, Clock::now() + kStopCheck)) return true;
  }
  return false;
}

bool TimedServer::process_and_close_socket(socket_t socket) {
  std::string remote, local;
  int remote_port = 0, local_port = 0;
  address(socket, ::getpeername, remote, remote_port);
  address(socket, ::getsockname, local, local_port);
  const bool served = serve_guarded([&] {
    bool good = false;
    bool closed = false;
    std::size_t left = keep_alive_max_count_;
    while (left > 0 && wait_for_request(socket)) {
      TimedStream stream(socket, Clock::now() + request_timeout_,
                         std::chrono::seconds(write_timeout_sec_));
      good = process_request(stream, remote, remote_port, local, local_port, left == 1, closed,
                             nullptr);
      if (!good || closed) break;
      --left;
    }
    return good;
  });
  close_gently(socket);
  return served;
}

}  // namespace morphkv::server
