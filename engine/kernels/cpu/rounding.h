// Floats to groups of 32 small integers with a scale.
#pragma once

#include "decoded_group.h"
#include "formats.h"

namespace slipstream {

// Q8Symmetric, to nearest.
DecodedGroup round_to_int8(const float x[kGroup]);

// Q4Affine: of several first scales, each refitted by least squares, the one with the least squared
// error.
DecodedGroup round_to_int4(const float x[kGroup]);

}  // namespace slipstream
