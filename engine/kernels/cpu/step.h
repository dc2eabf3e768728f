// What one forward pass computes, and the check that its indexes stay inside.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace slipstream {

struct KvShape {
  int block_size = 0;
  int num_blocks = 0;
  KvType type = KvType::F32;
};

// A packed step (engine.plan.PackedStep) with validated extents.
struct Step {
  int tokens = 0, chunks = 0, logits = 0, table_width = 0;
  const int32_t* token_ids = nullptr;
  const int32_t* positions = nullptr;
  const int64_t* slots = nullptr;
  const int32_t* query_starts = nullptr;
  const int32_t* context_lens = nullptr;
  const int32_t* block_tables = nullptr;
  const int32_t* logit_rows = nullptr;
};

// Throws std::invalid_argument for an index out of range, and for two tokens in one KV slot.
void check_step(const Step& step, int vocab, const KvShape& kv);

}  // namespace slipstream
