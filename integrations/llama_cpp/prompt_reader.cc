#include "prompt_reader.h"

#include <algorithm>

namespace morphkv::llama_cpp {

GuidePlan plan_guides(const Prompt& prompt, int wanted, int most, int most_guide) {
  const int usual = std::min(kGuideTokens, std::max(1, most / 8));
  const auto question = static_cast<int>(prompt.tokens.size() - prompt.question);
  GuidePlan plan;
  plan.tail = std::clamp(wanted > 0 ? wanted : usual, 1, std::min({question, most, most_guide}));
  plan.guide = prompt.guides.empty() || prompt.end_guides_too ? plan.tail : 0;
  for (const auto& guide : prompt.guides) {
    plan.guide = std::max(plan.guide, static_cast<int>(guide.size()));
  }
  plan.piece = std::max(most - plan.guide, (most + 1) / 2);
  if (!prompt.guides.empty()) plan.piece = std::max(plan.piece, plan.tail);  // both ask at the end
  return plan;
}

PromptReader::PromptReader(Evictor& evictor, llama_seq_id sequence,
                           std::span<const llama_token> tokens, int piece)
    : evictor_(evictor),
      sequence_(sequence),
      tokens_(tokens),
      guided_(false),
      plan_{.tail = 0, .piece = piece, .guide = 0} {
  begin_piece();
}

PromptReader::PromptReader(Evictor& evictor, llama_seq_id sequence, const Prompt& prompt,
                           const GuidePlan& plan)
    : evictor_(evictor),
      sequence_(sequence),
      tokens_(prompt.tokens),
      guided_(true),
      plan_(plan),
      guides_(prompt.guides),
      own_end_guides_(prompt.guides.empty()) {
  if (prompt.guides.empty() || prompt.end_guides_too) {
    guides_.emplace_back(tokens_.end() - plan.tail, tokens_.end());
  }
  begin_piece();
}

std::span<const llama_token> PromptReader::next() const {
  if (asking()) {
    return std::span(guides_[static_cast<std::size_t>(asking_)])
        .subspan(static_cast<std::size_t>(asked_));
  }
  return tokens_.subspan(static_cast<std::size_t>(at_), static_cast<std::size_t>(end_ - at_));
}

// The tail stays together, in the last piece.
void PromptReader::begin_piece() {
  const int rest = static_cast<int>(tokens_.size()) - at_;
  const bool all = rest <= std::max(plan_.piece, plan_.tail);
  end_ = at_ + (all ? rest : std::min(plan_.piece, rest - plan_.tail));
}

void PromptReader::evaluated(int n) {
  if (asking()) {
    asked_ += n;
    if (!next().empty()) return;
    evictor_.guide(sequence_);
    begin_guide(asking_ + 1);
  } else {
    at_ += n;
    if (at_ == end_) end_piece();
  }
}

void PromptReader::end_piece() {
  if (!guided_) {
    evictor_.after_decode({&sequence_, 1});
    begin_piece();
    return;
  }
  evictor_.hold(last() ? plan_.tail : 0, sequence_);
  const bool enough = evictor_.stats(sequence_).rows_kept <= evictor_.config(sequence_).budget;
  begin_guide(enough || (last() && own_end_guides_) ? static_cast<int>(guides_.size()) : 0);
}

void PromptReader::begin_guide(int guide) {
  asked_ = 0;
  asking_ = guide;
  if (guide < static_cast<int>(guides_.size())) return;
  asking_ = -1;
  evictor_.evict(sequence_);
  begin_piece();
}

void PromptReader::stop() {
  if (next().empty()) return;
  if (!guided_) {
    evictor_.after_decode({&sequence_, 1});
    return;
  }
  if (asking()) {
    evictor_.guide(sequence_);
  } else {
    evictor_.hold(0, sequence_);
  }
  evictor_.evict(sequence_);
}

}  // namespace morphkv::llama_cpp
