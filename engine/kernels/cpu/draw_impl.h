// Which tokens can win a Gumbel-max draw; the noise is that of engine/sampling/noise.py.
#pragma once

#include "kernels.h"

namespace slipstream {
namespace {

constexpr int kDrawBlock = 256;
constexpr int kNoiseBits = 32;
constexpr float kLog2E = 1.44269504f;

SLIPSTREAM_INLINE uint64_t mix(uint64_t v) {
  v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9u;
  v = (v ^ (v >> 27)) * 0x94D049BB133111EBu;
  return v ^ (v >> 31);
}

// At least 2^t, roundings included, and at most 1.07 times that: a straight line between powers of
// two, and a little more.
SLIPSTREAM_INLINE float pow2_bound(float t) {
  const float clamped = t > -126.0f ? (t < 126.0f ? t : 126.0f) : -126.0f;
  const int32_t bits = static_cast<int32_t>((clamped + 127.0f) * 8388608.0f) + 8;
  float bound;
  __builtin_memcpy(&bound, &bits, 4);
  return bound * 1.00001f;
}

// Columns [begin, end) of a row that may reach the score to beat: those with 1 - u <= exp(lead).
inline int likely_winners(const DrawRow& row, int begin, int end, int32_t* columns) {
  constexpr float kScale = 4294967296.0f;
  uint32_t misses[kDrawBlock];
  uint8_t may_win[kDrawBlock];
  int found = 0;
  for (int start = begin; start < end; start += kDrawBlock) {
    const int n = end - start < kDrawBlock ? end - start : kDrawBlock;
    const float* x = row.logits + start;
    const int64_t* ids = row.noise_ids + start;
    int any = 0;
    for (int i = 0; i < n; ++i) any |= x[i] >= row.lowest;
    if (any == 0) continue;
    for (int i = 0; i < n; ++i) {
      const uint64_t id = static_cast<uint64_t>(ids[i]);
      misses[i] = ~static_cast<uint32_t>(mix(row.key + id * 0x9E3779B97F4A7C15u) >> kNoiseBits);
    }
    any = 0;
    for (int i = 0; i < n; ++i) {
      const float chance = pow2_bound((x[i] - row.score_to_beat) * kLog2E) * kScale;
      may_win[i] = static_cast<uint8_t>((static_cast<float>(misses[i]) <= chance) &
                                        (x[i] >= row.lowest));
      any |= may_win[i];
    }
    for (int i = 0; any != 0 && i < n; ++i) {
      columns[found] = start + i;
      found += may_win[i];
    }
  }
  return found;
}

}  // namespace
}  // namespace slipstream
