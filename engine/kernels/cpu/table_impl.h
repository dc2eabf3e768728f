// Collects the including variant's kernels.
#pragma once

#include "attention_impl.h"
#include "draw_impl.h"
#include "elementwise_impl.h"
#include "linear_impl.h"

namespace slipstream {
namespace {

constexpr Kernels make_table(const char* name) {
  return {name,      linear_tiles, linear_row_tile, quantize_groups, rms_norm, rope, write_kv,
          attention, gated,        add_into,        likely_winners,  Simd::read};
}

}  // namespace
}  // namespace slipstream
