// Plain C++: the reference the other variants are tested against.
#pragma once

#include <cmath>

#include "half.h"
#include "kernels.h"

namespace slipstream {
namespace {

struct Simd {
  struct F { float v[16]; };
  struct I { int32_t v[16]; };
  struct Q { uint8_t v[64]; };
  static constexpr int kRows = 4;
  static constexpr bool kSignedDot = true;
  static constexpr bool kPairSums = false;

  template <class Fn>
  static SLIPSTREAM_INLINE F each(Fn fn) {
    F r;
    for (int i = 0; i < 16; ++i) r.v[i] = fn(i);
    return r;
  }

  static SLIPSTREAM_INLINE F zero() { return set1(0.0f); }
  static SLIPSTREAM_INLINE F set1(float x) { return each([&](int) { return x; }); }
  static SLIPSTREAM_INLINE F load(const float* p) { return each([&](int i) { return p[i]; }); }
  static SLIPSTREAM_INLINE F load_n(const float* p, int n) { return each([&](int i) { return i < n ? p[i] : 0.0f; }); }
  static SLIPSTREAM_INLINE void store(float* p, F a) { store_n(p, a, 16); }
  static SLIPSTREAM_INLINE void store_n(float* p, F a, int n) { for (int i = 0; i < n; ++i) p[i] = a.v[i]; }
  static SLIPSTREAM_INLINE F add(F a, F b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
  static SLIPSTREAM_INLINE F sub(F a, F b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
  static SLIPSTREAM_INLINE F mul(F a, F b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
  static SLIPSTREAM_INLINE F div(F a, F b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
  static SLIPSTREAM_INLINE F fma(F a, F b, F c) { return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
  static SLIPSTREAM_INLINE F max(F a, F b) { return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
  static SLIPSTREAM_INLINE F min(F a, F b) { return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
  static SLIPSTREAM_INLINE F round(F a) { return each([&](int i) { return std::nearbyint(a.v[i]); }); }
  static SLIPSTREAM_INLINE F zero_below(F x, F limit, F value) {
    return each([&](int i) { return x.v[i] < limit.v[i] ? 0.0f : value.v[i]; });
  }
  static SLIPSTREAM_INLINE F times_pow2(F a, F n) {
    return each([&](int i) {
      return std::isnan(n.v[i]) ? n.v[i] : std::ldexp(a.v[i], static_cast<int>(n.v[i]));
    });
  }
  static SLIPSTREAM_INLINE F window(F a, int first, int last, float outside) {
    return each([&](int i) { return i >= first && i <= last ? a.v[i] : outside; });
  }
  static SLIPSTREAM_INLINE float hmax(F a) {
    float r = a.v[0];
    for (int i = 1; i < 16; ++i) r = a.v[i] > r ? a.v[i] : r;
    return r;
  }
  static SLIPSTREAM_INLINE float largest_magnitude(F a, F b) {
    uint32_t r = 0;
    for (int i = 0; i < 16; ++i) {
      for (const float x : {a.v[i], b.v[i]}) {
        const uint32_t magnitude = float_bits(x) & 0x7fffffff;
        r = magnitude > r ? magnitude : r;
      }
    }
    return bits_float(r);
  }
  static SLIPSTREAM_INLINE float hsum(F a) {
    for (int width = 8; width > 0; width /= 2)
      for (int i = 0; i < width; ++i) a.v[i] += a.v[i + width];
    return a.v[0];
  }
  static SLIPSTREAM_INLINE F load_half(const uint16_t* p) { return each([&](int i) { return half_to_float(p[i]); }); }
  static SLIPSTREAM_INLINE F load_bfloat(const uint16_t* p) {
    return each([&](int i) { return bfloat_to_float(p[i]); });
  }
  static SLIPSTREAM_INLINE F load_u8(const uint8_t* p) { return each([&](int i) { return static_cast<float>(p[i]); }); }
  static SLIPSTREAM_INLINE F load_s8(const int8_t* p) { return each([&](int i) { return static_cast<float>(p[i]); }); }
  static SLIPSTREAM_INLINE int quantize(F a, int8_t* out) {
    int sum = 0;
    for (int i = 0; i < 16; ++i) {
      out[i] = static_cast<int8_t>(std::nearbyint(a.v[i]));
      sum += out[i];
    }
    return sum;
  }

  static SLIPSTREAM_INLINE I iset1(int32_t x) {
    I r;
    for (int i = 0; i < 16; ++i) r.v[i] = x;
    return r;
  }
  static SLIPSTREAM_INLINE F to_float(I a) { return each([&](int i) { return static_cast<float>(a.v[i]); }); }

  template <class Fn>
  static SLIPSTREAM_INLINE Q each_byte(Fn fn) {
    Q r;
    for (int i = 0; i < 64; ++i) r.v[i] = static_cast<uint8_t>(fn(i));
    return r;
  }
  static SLIPSTREAM_INLINE Q load_q(const uint8_t* p) { return each_byte([&](int i) { return p[i]; }); }
  static SLIPSTREAM_INLINE Q low_nibbles(Q a) { return each_byte([&](int i) { return a.v[i] & 15; }); }
  static SLIPSTREAM_INLINE Q high_nibbles(Q a) { return each_byte([&](int i) { return a.v[i] >> 4; }); }
  template <int kShift>
  static SLIPSTREAM_INLINE Q with_top(Q nibbles, Q tops) {
    return each_byte([&](int i) { return nibbles.v[i] | ((tops.v[i] >> kShift & 3) << 4); });
  }
  static SLIPSTREAM_INLINE Q repeat16(const int8_t* p) { return each_byte([&](int i) { return p[i % 16]; }); }
  static SLIPSTREAM_INLINE Q look_up(Q table, Q nibbles) {
    return each_byte([&](int i) { return table.v[nibbles.v[i]]; });
  }
  static SLIPSTREAM_INLINE Q flip_sign(Q a) { return each_byte([&](int i) { return a.v[i] ^ 0x80; }); }
  static SLIPSTREAM_INLINE I dot(I acc, Q w, const int8_t* x) {
    for (int i = 0; i < 64; ++i) acc.v[i / 4] += static_cast<int8_t>(w.v[i]) * x[i % 4];
    return acc;
  }
  static SLIPSTREAM_INLINE I dot_signed(I acc, Q w, const int8_t* x) { return dot(acc, w, x); }
  static SLIPSTREAM_INLINE void prefetch_near(const void*) {}
  static SLIPSTREAM_INLINE void prefetch_far(const void*) {}
  static uint64_t read(const uint8_t* p, size_t bytes) {
    uint64_t sum = 0, word;
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
      std::memcpy(&word, p + i, 8);
      sum += word;
    }
    return sum;
  }
};

}  // namespace
}  // namespace slipstream
