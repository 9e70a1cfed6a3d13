// httplib's server, with a limit on the time that a client takes to send a request. httplib itself
// limits the wait for each next byte only, so that clients whose bytes drip in would hold all its
// threads.
#pragma once

#include <httplib.h>

#include <chrono>

namespace morphkv::server {

class TimedServer : public httplib::Server {
 public:
  // From a request's first byte to the last one of its body; whoever is later is cut off.
  void set_request_timeout(std::chrono::milliseconds limit) { request_timeout_ = limit; }

 private:
  bool process_and_close_socket(socket_t socket) override;
  bool wait_for_request(socket_t socket) const;

  std::chrono::milliseconds request_timeout_{60'000};
};

}  // namespace morphkv::server
