// What one forward pass computes.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "kernels.h"

namespace slipstream {

inline void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

struct KvShape {
  int block_size = 0;
  int num_blocks = 0;
  KvType type = KvType::F32;
};

// A packed step (engine.plan.PackedStep): arrays of validated lengths with any values.
struct Step {
  int tokens = 0, slices = 0, logits = 0, table_width = 0;
  const int32_t* token_ids = nullptr;
  const int32_t* positions = nullptr;
  const int64_t* slots = nullptr;
  const int32_t* query_starts = nullptr;
  const int32_t* context_lens = nullptr;
  const int32_t* block_tables = nullptr;
  const int32_t* logit_rows = nullptr;
};

// Throws std::invalid_argument for an index that a pass must not follow: one out of range, or one
// that two tokens write to.
void check(const Step& step, int vocab, const KvShape& kv);

}  // namespace slipstream
