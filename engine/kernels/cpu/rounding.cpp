#include "rounding.h"

#include <cmath>

#include "half.h"

namespace slipstream {
namespace {

// Into how many steps of the first scales a group's extent goes: fewer clip its outermost values.
constexpr float kExtentInSteps[] = {13.8f, 14.1f, 14.4f, 14.7f, 15.0f, 15.3f, 15.6f};
constexpr float kLargestInSteps[] = {6.8f, 7.1f, 7.4f, 7.7f, 8.0f, 8.3f, 8.6f};

int clamp_round(float x, int low, int high) {
  const int n = static_cast<int>(std::nearbyint(x));
  return n < low ? low : n > high ? high : n;
}

// x rounded to d q + m, 0 <= q <= 15.
struct Int4Trial {
  float scale = 0.0f, minimum = 0.0f;  // as float16 keeps them
  float q[kGroup] = {};
  float error = 0.0f;

  Int4Trial(const float x[kGroup], float d, float m)
      : scale(half_to_float(float_to_half(d))), minimum(half_to_float(float_to_half(m))) {
    const float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
    for (int i = 0; i < kGroup; ++i) {
      const float level = (x[i] - minimum) * inverse + 0.5f;
      const float clamped = level > 0.0f ? (level < 15.0f ? level : 15.0f) : 0.0f;
      q[i] = static_cast<float>(static_cast<int>(clamped));
      const float miss = scale * q[i] + minimum - x[i];
      error += miss * miss;
    }
  }
};

// The scale that fits the quants of a trial around 8 best.
Int4Trial refitted_around_8(const float x[kGroup], const Int4Trial& trial) {
  float sum_qq = 0.0f, sum_xq = 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    const float q = trial.q[i] - 8.0f;
    sum_qq += q * q;
    sum_xq += x[i] * q;
  }
  if (sum_qq <= 0.0f) return trial;
  const float d = sum_xq / sum_qq;
  return {x, d, -8.0f * d};
}

// The scale and minimum that fit the quants of a trial best.
Int4Trial refitted(const float x[kGroup], const Int4Trial& trial) {
  float sum_x = 0.0f, sum_q = 0.0f, sum_qq = 0.0f, sum_xq = 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    sum_x += x[i];
    sum_q += trial.q[i];
    sum_qq += trial.q[i] * trial.q[i];
    sum_xq += x[i] * trial.q[i];
  }
  const float spread = kGroup * sum_qq - sum_q * sum_q;
  if (spread <= 0.0f) return trial;
  const float d = (kGroup * sum_xq - sum_x * sum_q) / spread;
  return {x, d, (sum_x - d * sum_q) / kGroup};
}

// Scales are rounded to float16 first, so that the quants are the nearest to what is kept.
DecodedGroup round_to_int8(const float x[kGroup]) {
  float largest = 0.0f;
  for (int i = 0; i < kGroup; ++i) largest = std::fmax(largest, std::fabs(x[i]));
  DecodedGroup g;
  g.d = float_to_half(largest / 127.0f);
  const float scale = half_to_float(g.d);
  for (int i = 0; i < kGroup; ++i) {
    const int q = scale > 0.0f ? clamp_round(x[i] / scale, -127, 127) : 0;
    g.q[i] = static_cast<uint8_t>(static_cast<int8_t>(q));
  }
  return g;
}

DecodedGroup round_to_affine_int4(const float x[kGroup]) {
  float low = x[0], high = x[0];
  for (int i = 1; i < kGroup; ++i) {
    low = std::fmin(low, x[i]);
    high = std::fmax(high, x[i]);
  }
  Int4Trial best(x, (high - low) / 15.0f, low);
  for (const float steps : kExtentInSteps) {
    const float d = (high - low) / steps;
    const Int4Trial trial = refitted(x, {x, d, (low + high - 15.0f * d) / 2.0f});
    if (trial.error < best.error) best = trial;
  }
  DecodedGroup g;
  g.d = float_to_half(best.scale);
  g.m = float_to_half(best.minimum);
  for (int i = 0; i < kGroup; ++i) g.q[i] = static_cast<uint8_t>(best.q[i]);
  return g;
}

DecodedGroup round_to_symmetric_int4(const float x[kGroup]) {
  float largest = x[0];
  for (int i = 1; i < kGroup; ++i) largest = std::fabs(x[i]) > std::fabs(largest) ? x[i] : largest;
  // There is one step more below 8 than above: the largest value goes there.
  Int4Trial best(x, -largest / 8.0f, largest);
  for (const float steps : kLargestInSteps) {
    const float d = -largest / steps;
    const Int4Trial trial = refitted_around_8(x, {x, d, -8.0f * d});
    if (trial.error < best.error) best = trial;
  }
  DecodedGroup g;
  g.d = float_to_half(best.scale);
  for (int i = 0; i < kGroup; ++i) g.q[i] = static_cast<uint8_t>(best.q[i]);
  return g;
}

bool all_finite(const float x[kGroup]) {
  bool finite = true;
  for (int i = 0; i < kGroup; ++i) finite &= std::isfinite(x[i]);
  return finite;
}

}  // namespace

DecodedGroup round_group(Format to, const float x[kGroup]) {
  if (!all_finite(x)) {
    DecodedGroup nan;
    nan.d = kHalfNan;
    return nan;
  }
  if (to == Format::Q8Symmetric) return round_to_int8(x);
  return to == Format::Q4Affine ? round_to_affine_int4(x) : round_to_symmetric_int4(x);
}

}  // namespace slipstream
