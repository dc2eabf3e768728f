// What packing writes: one row's 32 columns.
#pragma once

#include <cstdint>

namespace slipstream {

// One group as the packed formats want it; which fields count depends on the format.
struct DecodedGroup {
  uint8_t q[32] = {};
  uint16_t d = 0, m = 0;           // float16 scale (super-scale) and minimum (super-minimum)
  uint8_t small_scale = 0, small_minimum = 0;
  int8_t half_scales[2] = {};
  float scale = 0.0f, minimum = 0.0f;  // of Q8Affine
};

}  // namespace slipstream
