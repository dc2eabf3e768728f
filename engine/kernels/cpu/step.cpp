#include "step.h"

#include <algorithm>
#include <vector>

#include "require.h"

namespace slipstream {
namespace {

void check_chunk(const Step& step, int chunk, const KvShape& kv) {
  const int size = kv.block_size;
  const int32_t* table = step.block_tables + int64_t{chunk} * step.table_width;
  const int64_t blocks = ceil_div(step.context_lens[chunk], size);
  require(blocks <= step.table_width, "block_tables is too narrow for context_lens");
  for (int64_t b = 0; b < blocks; ++b) {
    require(table[b] >= 0 && table[b] < kv.num_blocks, "KV block out of range");
  }
  const int begin = step.query_starts[chunk], end = step.query_starts[chunk + 1];
  for (int t = begin; t < end; ++t) {
    const int position = step.positions[t];
    require(position >= 0 && position < step.context_lens[chunk],
            "a position lies outside its slice's context");
    require(t == begin || position == step.positions[t - 1] + 1,
            "the positions of a slice must follow each other");
    require(step.slots[t] == int64_t{table[position / size]} * size + position % size,
            "a KV slot is not its position's in block_tables");
  }
}

}  // namespace

void check_step(const Step& step, int vocab, const KvShape& kv) {
  require(step.chunks > 0 && step.query_starts[0] == 0, "query_starts must begin with 0");
  require(step.query_starts[step.chunks] == step.tokens, "query_starts must end with the tokens");
  for (int c = 0; c < step.chunks; ++c) {
    require(step.query_starts[c] < step.query_starts[c + 1] &&
                step.query_starts[c + 1] <= step.tokens,
            "a slice needs at least one token of the step");
    check_chunk(step, c, kv);
  }
  for (int t = 0; t < step.tokens; ++t) {
    require(step.token_ids[t] >= 0 && step.token_ids[t] < vocab, "token id out of range");
  }
  for (int l = 0; l < step.logits; ++l) {
    require(step.logit_rows[l] >= 0 && step.logit_rows[l] < step.tokens,
            "a logit row lies outside the step");
    require(l == 0 || step.logit_rows[l] > step.logit_rows[l - 1], "logit_rows must ascend");
  }
  std::vector<int64_t> slots(step.slots, step.slots + step.tokens);
  std::sort(slots.begin(), slots.end());
  require(std::adjacent_find(slots.begin(), slots.end()) == slots.end(),
          "two tokens have one KV slot");
}

}  // namespace slipstream
