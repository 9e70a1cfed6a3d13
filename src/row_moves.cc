#include "morphkv/row_moves.h"

#include <cassert>

namespace morphkv {

int plan_row_moves(std::span<const int> victims, std::span<const int> freed,
                   std::span<RowMove> out) {
  assert(victims.size() == freed.size() && out.size() >= freed.size());
  int n_from = 0;
  int n_to = 0;
  std::size_t v = 0;
  std::size_t f = 0;
  while (v < victims.size() || f < freed.size()) {
    if (v < victims.size() && f < freed.size() && victims[v] == freed[f]) {
      ++v;
      ++f;
    } else if (f == freed.size() || (v < victims.size() && victims[v] < freed[f])) {
      out[n_to++].to = victims[v++];
    } else {
      out[n_from++].from = freed[f++];
    }
  }
  assert(n_from == n_to);
  return n_from;
}

}  // namespace morphkv
