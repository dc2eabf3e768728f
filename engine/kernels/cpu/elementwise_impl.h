// Norms, RoPE, gated activations and activation quantization over the including variant's Simd.
#pragma once

#include "half.h"
#include "kernels.h"

namespace slipstream {
namespace {

constexpr float kLargestFinite = 3.402823466e38f;
constexpr float kNan = __builtin_nanf("");

// A NaN where x is infinite: only so can no later step turn an overflow into a finite number.
SLIPSTREAM_INLINE Simd::F nan_if_infinite(Simd::F x) { return Simd::fma(x, Simd::zero(), x); }

// exp(x), 0 below -87, NaN for a NaN (which min and max let pass as their second argument). Range reduction to |r| <= ln(2) / 2 and a degree-6 Taylor polynomial
// (relative error below 2e-7).
inline Simd::F exp16(Simd::F x) {
  const Simd::F lowest = Simd::set1(-87.0f);
  const Simd::F clamped = Simd::min(Simd::set1(88.0f), Simd::max(lowest, x));
  const Simd::F n = Simd::round(Simd::mul(clamped, Simd::set1(1.44269504088896341f)));
  Simd::F r = Simd::fma(n, Simd::set1(-0.693359375f), clamped);
  r = Simd::fma(n, Simd::set1(2.12194440e-4f), r);
  Simd::F p = Simd::set1(1.0f / 720.0f);
  p = Simd::fma(p, r, Simd::set1(1.0f / 120.0f));
  p = Simd::fma(p, r, Simd::set1(1.0f / 24.0f));
  p = Simd::fma(p, r, Simd::set1(1.0f / 6.0f));
  p = Simd::fma(p, r, Simd::set1(0.5f));
  p = Simd::fma(p, r, Simd::set1(1.0f));
  p = Simd::fma(p, r, Simd::set1(1.0f));
  return Simd::zero_below(x, lowest, Simd::times_pow2(p, n));
}

inline int lanes_left(int n, int i) { return n - i < 16 ? n - i : 16; }

inline void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
  Simd::F squares = Simd::zero();
  for (int i = 0; i < n; i += 16) {
    const Simd::F v = Simd::load_n(x + i, lanes_left(n, i));
    squares = Simd::fma(v, v, squares);
  }
  const float mean = Simd::hsum(squares) / static_cast<float>(n);
  // Where the squares overflow, the reciprocal would make zeros of all that is finite.
  const Simd::F scale =
      Simd::set1(mean <= kLargestFinite ? 1.0f / __builtin_sqrtf(mean + eps) : kNan);
  for (int i = 0; i < n; i += 16) {
    const int m = lanes_left(n, i);
    const Simd::F v = Simd::mul(Simd::load_n(x + i, m), scale);
    Simd::store_n(out + i, Simd::mul(v, Simd::load_n(weight + i, m)), m);
  }
}

// Rotates halves: element i pairs with element i + head_dim / 2.
inline void rope(float* x, const float* cos, const float* sin, int head_dim) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; i += 16) {
    const int m = lanes_left(half, i);
    const Simd::F a = Simd::load_n(x + i, m), b = Simd::load_n(x + half + i, m);
    const Simd::F c = Simd::load_n(cos + i, m), s = Simd::load_n(sin + i, m);
    Simd::store_n(x + i, Simd::sub(Simd::mul(a, c), Simd::mul(b, s)), m);
    Simd::store_n(x + half + i, Simd::add(Simd::mul(b, c), Simd::mul(a, s)), m);
  }
}

inline Simd::F activate(Simd::F gate, Activation kind) {
  Simd::F inner = gate;
  if (kind == Activation::GeluTanh) {  // 0.5 x (1 + tanh(z)) = x / (1 + exp(-2 z))
    const Simd::F cubic = Simd::fma(Simd::mul(gate, gate), Simd::set1(0.044715f), Simd::set1(1.0f));
    inner = Simd::mul(Simd::mul(gate, cubic), Simd::set1(1.5957691216057308f));
  }
  const Simd::F denominator =
      Simd::add(Simd::set1(1.0f), exp16(Simd::sub(Simd::zero(), inner)));
  return Simd::div(gate, denominator);
}

inline void gated(const float* gate, const float* up, int n, Activation kind, float* out) {
  for (int i = 0; i < n; i += 16) {
    const int m = lanes_left(n, i);
    const Simd::F v = activate(Simd::load_n(gate + i, m), kind);
    Simd::store_n(out + i, Simd::mul(v, Simd::load_n(up + i, m)), m);
  }
}

inline void add_into(const float* x, int n, float* into) {
  for (int i = 0; i < n; i += 16) {
    const int m = lanes_left(n, i);
    Simd::store_n(into + i, Simd::add(Simd::load_n(into + i, m), Simd::load_n(x + i, m)), m);
  }
}

constexpr float kLeastToRound = 1e-36f;  // below, the reciprocal overflows

// Rounds a group of 32 to signed bytes and turns it into what rounding left. A group with a NaN or
// an infinity gets the scale NaN, so that every sum over it is one.
inline void quantize_group(Simd::F& low, Simd::F& high, int row, int group, QuantizedRows& to) {
  const int block = row / kRowBlock, r = row % kRowBlock, in_block = to.block_rows(block);
  const int64_t base = to.block_offset(block) + int64_t{group} * in_block;
  const float largest = Simd::largest_magnitude(low, high);
  float scale = largest >= kLeastToRound ? largest / 127.0f : 0.0f;
  if (!(largest <= kLargestFinite)) {
    low = high = Simd::zero();
    scale = kNan;
  }
  const Simd::F inverse = Simd::set1(scale > 0.0f ? 127.0f / largest : 0.0f);
  low = Simd::mul(low, inverse);
  high = Simd::mul(high, inverse);
  const int64_t at = base + r;
  const int low_sum = Simd::quantize(low, to.q + at * kGroup);
  const int high_sum = Simd::quantize(high, to.q + at * kGroup + 16);
  low = Simd::mul(Simd::sub(low, Simd::round(low)), Simd::set1(scale));
  high = Simd::mul(Simd::sub(high, Simd::round(high)), Simd::set1(scale));
  to.scale[at] = scale;
  to.scaled_sum[at] = scale * static_cast<float>(low_sum + high_sum);
  int32_t* sums = to.negated_sums + base * kSumKinds + r;
  sums[0] = -(low_sum + high_sum);
  sums[in_block] = -low_sum;
  sums[2 * in_block] = -high_sum;
}

inline void quantize_groups(const float* x, int cols, int row, int remainder_row, int begin,
                            int end, QuantizedRows& to) {
  for (int g = begin; g < end; ++g) {
    const int n = cols - g * kGroup < 0 ? 0 : cols - g * kGroup;
    const float* from = x + g * kGroup;
    Simd::F low = Simd::load_n(from, n < 16 ? n : 16);
    Simd::F high = n > 16 ? Simd::load_n(from + 16, lanes_left(n, 16)) : Simd::zero();
    quantize_group(low, high, row, g, to);
    if (remainder_row >= 0) quantize_group(low, high, remainder_row, g, to);
  }
}

inline void store_kv(void* base, KvType type, int64_t index, float x) {
  if (type == KvType::F32) {
    static_cast<float*>(base)[index] = x;
  } else {
    static_cast<uint16_t*>(base)[index] = float_to_bfloat(x);
  }
}

inline void write_kv(const KvLayer& kv, int64_t slot, int head, const float* key,
                     const float* value) {
  const int64_t block = slot / kv.block_size, token = slot % kv.block_size;
  const int64_t k = kv.key_offset(block, head) + token;
  const int64_t v = kv.value_offset(block, head) + token * kv.value_stride();
  for (int d = 0; d < kv.head_dim; ++d) {
    store_kv(kv.keys, kv.type, k + int64_t{d} * kv.padded_block, key[d]);
    store_kv(kv.values, kv.type, v + d, value[d]);
  }
}

}  // namespace
}  // namespace slipstream
