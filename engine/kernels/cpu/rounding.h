// Floats to groups of 32 small integers with a scale.
#pragma once

#include "decoded_group.h"
#include "formats.h"

namespace slipstream {

// Whether floats can be rounded to a format.
constexpr bool can_round_to(Format f) {
  return f == Format::Q8Symmetric || f == Format::Q4Affine || f == Format::Q4Symmetric;
}

// Rounds a group: for Q8Symmetric to nearest, for Q4Affine and Q4Symmetric with the least squared error
// of several first scales, each refitted by least squares. A NaN or infinity makes all of it NaN.
DecodedGroup round_group(Format to, const float x[kGroup]);

}  // namespace slipstream
