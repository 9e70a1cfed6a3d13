// A prompt that is read in pieces: what is evaluated next, and what follows once it is. Who
// evaluates it, and in how many batches, is the caller's business.
#pragma once

#include <llama.h>

#include <span>
#include <vector>

#include "morphkv/llama_cpp/evictor.h"
#include "morphkv/llama_cpp/turn.h"

namespace morphkv::llama_cpp {

// Sizes of guided reading. A piece and its guide fill a call, or the piece half of it.
struct GuidePlan {
  int tail = 0;   // the prompt's last tokens that ask
  int piece = 0;  // tokens between two evictions
  int guide = 0;  // most tokens of a guide after a piece
};
// `wanted`: tokens of the tail, 0 = the usual number. `most`: tokens of a piece and its guide;
// `most_guide`: those of a guide.
GuidePlan plan_guides(const Prompt& prompt, int wanted, int most, int most_guide);

class PromptReader {
 public:
  // Reads the tokens of the prompt into the sequence, in pieces; the evictor decides after each.
  // The prompt's tokens must outlive the reader.
  PromptReader(Evictor& evictor, llama_seq_id sequence, std::span<const llama_token> tokens,
               int piece);
  // The same with guides: after each piece they say which rows matter, at the end the prompt's own
  // last tokens do.
  PromptReader(Evictor& evictor, llama_seq_id sequence, const Prompt& prompt,
               const GuidePlan& plan);

  // What is to be evaluated next, in one batch or in several; empty when the prompt is read.
  std::span<const llama_token> next() const;
  // They are a guide: not part of the prompt, and in one batch for models with sliding windows.
  bool asking() const { return asking_ >= 0; }
  // The prompt ends with them: whoever evaluates the last one wants its logits.
  bool last() const { return !asking() && end_ == static_cast<int>(tokens_.size()); }
  // The first n tokens of next() have been evaluated.
  void evaluated(int n);
  // Nothing more will be: what has been evaluated is decided about.
  void stop();

  // Tokens of the prompt evaluated so far.
  int done() const { return at_; }

 private:
  void begin_piece();
  void end_piece();
  void begin_guide(int guide);

  Evictor& evictor_;
  llama_seq_id sequence_;
  std::span<const llama_token> tokens_;
  bool guided_;
  GuidePlan plan_;
  std::vector<std::vector<llama_token>> guides_;
  bool own_end_guides_ = true;  // no other guide asks at the end of the prompt
  int at_ = 0;                  // in tokens_
  int end_ = 0;                 // of the piece
  int asking_ = -1;             // guide that is being evaluated, -1 = none
  int asked_ = 0;               // of its tokens
};

}  // namespace morphkv::llama_cpp
