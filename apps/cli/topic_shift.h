// The experiment of `morphkv bench topic-shift`: a text that changes its subject, and which of the
// rows that the new subject needs a policy still holds. Made of random keys, without a model: it
// shows what a rule does, not what it is worth on real text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "morphkv/config.h"

namespace morphkv::cli {

// Keys [token, dim]. A topic is a direction. A token of a topic has the key
// strength * direction + noise; the tokens that ask at the end are of the last topic as well, with
// the key signal * direction + noise. Noise is normal in every number, with the given deviation.
struct TopicShiftGeometry {
  int dim = 32;
  int first_tokens = 256;  // of the first topic
  int needed_tokens = 16;  // of the second topic: what the end of the text needs
  int asking_tokens = 96;  // weak and noisy tokens of the second topic, at the end
  double strength = 3.0;
  double signal = 0.5;
  double noise = 0.8;
  int budget = 64;
  int n_sink = 1;
  int recent = 32;  // protected tail of every arm, so that all have as many rows to choose
  int seeds = 50;
};

// Rows that are neither sinks nor in the tail.
constexpr int free_rows(const TopicShiftGeometry& g) { return g.budget - g.n_sink - g.recent; }

struct TopicShiftArm {
  std::string name;
  CacheConfig config;
  std::vector<double> shift;    // [seed] share of the needed tokens that are held at the end
  std::vector<double> control;  // [seed] the same for a text of one topic, every token of which is
                                // needed: of the rows to choose, the share that is on topic
};

// h2o, morphkv with windows 1, 8 and 32, streaming; all with query source keys. Throws
// std::invalid_argument for numbers that allow no experiment.
std::vector<TopicShiftArm> measure_topic_shift(const TopicShiftGeometry& geometry);

double mean_of(const std::vector<double>& values);
double deviation_of(const std::vector<double>& values);  // of the sample

}  // namespace morphkv::cli
