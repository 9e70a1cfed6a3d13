// The policies that have a name, one file each. What they keep and where they come from stands at
// the head of their files; policies.cc has the list of the names.
#pragma once

#include <memory>
#include <string_view>
#include <utility>

#include "morphkv/config.h"
#include "morphkv/policy.h"

namespace morphkv::policies {

std::unique_ptr<Policy> make_morphkv(const CacheConfig& config);
std::unique_ptr<Policy> make_h2o(const CacheConfig& config);
std::unique_ptr<Policy> make_snapkv(const CacheConfig& config);
std::unique_ptr<Policy> make_tova(const CacheConfig& config);
std::unique_ptr<Policy> make_keydiff(const CacheConfig& config);
std::unique_ptr<Policy> make_rkv(const CacheConfig& config);
std::unique_ptr<Policy> make_streaming(const CacheConfig& config);
std::unique_ptr<Policy> make_random(const CacheConfig& config);
std::unique_ptr<Policy> make_full(const CacheConfig& config);

// The policy that a valid configuration names.
std::unique_ptr<Policy> make(const CacheConfig& config);

// A policy that is no more than a name, its traits and a way to make heads.
class NamedPolicy final : public Policy {
 public:
  using MakeHead = std::unique_ptr<HeadPolicy> (*)(const CacheConfig&, HeadId);

  NamedPolicy(CacheConfig config, PolicyTraits traits, MakeHead make)
      : config_(std::move(config)), traits_(traits), make_(make) {}

  std::string_view name() const override { return config_.policy; }
  PolicyTraits traits() const override { return traits_; }
  std::unique_ptr<HeadPolicy> make_head(HeadId id) const override { return make_(config_, id); }

 private:
  CacheConfig config_;
  PolicyTraits traits_;
  MakeHead make_;
};

}  // namespace morphkv::policies
