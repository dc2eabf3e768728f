// Floats to groups of 32 small integers with a scale.
#pragma once

#include "decoded_group.h"
#include "formats.h"

namespace slipstream {

// Q8Symmetric, to nearest.
DecodedGroup round_to_int8(const float x[kGroup]);

// Q4Affine and Q4Symmetric: of several first scales, each refitted by least squares, the one with
// the least squared error.
DecodedGroup round_to_affine_int4(const float x[kGroup]);
DecodedGroup round_to_symmetric_int4(const float x[kGroup]);

// Whether floats can be rounded to a format.
constexpr bool can_round_to(Format f) {
  return f == Format::Q8Symmetric || f == Format::Q4Affine || f == Format::Q4Symmetric;
}

inline DecodedGroup round_group(Format to, const float x[kGroup]) {
  if (to == Format::Q8Symmetric) return round_to_int8(x);
  return to == Format::Q4Affine ? round_to_affine_int4(x) : round_to_symmetric_int4(x);
}

}  // namespace slipstream
