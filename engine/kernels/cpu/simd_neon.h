// AArch64 NEON with the dot product extension: sixteen lanes are four vectors of four.
#pragma once

#include <arm_neon.h>

#include "half.h"
#include "kernels.h"

namespace slipstream {
namespace {

struct Simd {
  struct F { float32x4_t v[4]; };
  struct I { int32x4_t v[4]; };
  struct Q { uint8x16_t v[4]; };
  static constexpr int kRows = 4;
  static constexpr bool kSignedDot = true;
  static constexpr bool kPairSums = false;

  template <class Fn>
  static SLIPSTREAM_INLINE F each(Fn fn) { return {{fn(0), fn(1), fn(2), fn(3)}}; }
  template <class Fn>
  static SLIPSTREAM_INLINE Q each_q(Fn fn) { return {{fn(0), fn(1), fn(2), fn(3)}}; }

  static SLIPSTREAM_INLINE F zero() { return set1(0.0f); }
  static SLIPSTREAM_INLINE F set1(float x) { return each([&](int) { return vdupq_n_f32(x); }); }
  static SLIPSTREAM_INLINE F load(const float* p) { return each([&](int i) { return vld1q_f32(p + 4 * i); }); }
  static SLIPSTREAM_INLINE F load_n(const float* p, int n) {
    float lanes[16] = {};
    for (int i = 0; i < n && i < 16; ++i) lanes[i] = p[i];
    return load(lanes);
  }
  static SLIPSTREAM_INLINE void store(float* p, F a) { for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]); }
  static SLIPSTREAM_INLINE void store_n(float* p, F a, int n) {
    float lanes[16];
    store(lanes, a);
    for (int i = 0; i < n && i < 16; ++i) p[i] = lanes[i];
  }
  static SLIPSTREAM_INLINE F add(F a, F b) { return each([&](int i) { return vaddq_f32(a.v[i], b.v[i]); }); }
  static SLIPSTREAM_INLINE F sub(F a, F b) { return each([&](int i) { return vsubq_f32(a.v[i], b.v[i]); }); }
  static SLIPSTREAM_INLINE F mul(F a, F b) { return each([&](int i) { return vmulq_f32(a.v[i], b.v[i]); }); }
  static SLIPSTREAM_INLINE F div(F a, F b) { return each([&](int i) { return vdivq_f32(a.v[i], b.v[i]); }); }
  static SLIPSTREAM_INLINE F fma(F a, F b, F c) {
    return each([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
  }
  static SLIPSTREAM_INLINE F max(F a, F b) { return each([&](int i) { return vmaxq_f32(a.v[i], b.v[i]); }); }
  static SLIPSTREAM_INLINE F min(F a, F b) { return each([&](int i) { return vminq_f32(a.v[i], b.v[i]); }); }
  static SLIPSTREAM_INLINE F round(F a) { return each([&](int i) { return vrndnq_f32(a.v[i]); }); }
  static SLIPSTREAM_INLINE F zero_below(F x, F limit, F value) {
    return each([&](int i) {
      return vbslq_f32(vcltq_f32(x.v[i], limit.v[i]), vdupq_n_f32(0.0f), value.v[i]);
    });
  }
  static SLIPSTREAM_INLINE F times_pow2(F a, F n) {
    return each([&](int i) {
      const int32x4_t exponent = vaddq_s32(vcvtq_s32_f32(n.v[i]), vdupq_n_s32(127));
      return vmulq_f32(a.v[i], vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
    });
  }
  static SLIPSTREAM_INLINE F window(F a, int first, int last, float outside) {
    float lanes[16];
    store(lanes, a);
    for (int i = 0; i < 16; ++i) lanes[i] = i >= first && i <= last ? lanes[i] : outside;
    return load(lanes);
  }
  static SLIPSTREAM_INLINE float hmax(F a) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3])));
  }
  static SLIPSTREAM_INLINE float largest_magnitude(F a, F b) {
    uint32x4_t m = vdupq_n_u32(0);
    for (int i = 0; i < 4; ++i) {
      m = vmaxq_u32(m, vreinterpretq_u32_f32(vabsq_f32(a.v[i])));
      m = vmaxq_u32(m, vreinterpretq_u32_f32(vabsq_f32(b.v[i])));
    }
    return bits_float(vmaxvq_u32(m));
  }
  static SLIPSTREAM_INLINE float hsum(F a) {
    const float32x4_t low = vaddq_f32(a.v[0], a.v[2]), high = vaddq_f32(a.v[1], a.v[3]);
    const float32x4_t s = vaddq_f32(low, high);
    const float32x2_t pair = vadd_f32(vget_low_f32(s), vget_high_f32(s));
    return vget_lane_f32(pair, 0) + vget_lane_f32(pair, 1);
  }
  static SLIPSTREAM_INLINE F load_half(const uint16_t* p) {
    return each([&](int i) {
      return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
    });
  }
  static SLIPSTREAM_INLINE F load_bfloat(const uint16_t* p) {
    return each([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
  }
  static SLIPSTREAM_INLINE F load_u8(const uint8_t* p) {
    const uint8x16_t bytes = vld1q_u8(p);
    const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_u8(vget_high_u8(bytes));
    return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(low))),
             vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))),
             vcvtq_f32_u32(vmovl_u16(vget_high_u16(high)))}};
  }
  static SLIPSTREAM_INLINE F load_s8(const int8_t* p) {
    const int8x16_t bytes = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
             vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
  }
  static SLIPSTREAM_INLINE int quantize(F a, int8_t* out) {
    int32x4_t q[4];
    for (int i = 0; i < 4; ++i) q[i] = vcvtnq_s32_f32(a.v[i]);
    const int16x8_t low = vcombine_s16(vqmovn_s32(q[0]), vqmovn_s32(q[1]));
    const int16x8_t high = vcombine_s16(vqmovn_s32(q[2]), vqmovn_s32(q[3]));
    vst1q_s8(out, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
    return vaddvq_s32(vaddq_s32(vaddq_s32(q[0], q[1]), vaddq_s32(q[2], q[3])));
  }

  static SLIPSTREAM_INLINE I iset1(int32_t x) {
    const int32x4_t v = vdupq_n_s32(x);
    return {{v, v, v, v}};
  }
  static SLIPSTREAM_INLINE F to_float(I a) { return each([&](int i) { return vcvtq_f32_s32(a.v[i]); }); }

  static SLIPSTREAM_INLINE Q load_q(const uint8_t* p) { return each_q([&](int i) { return vld1q_u8(p + 16 * i); }); }
  static SLIPSTREAM_INLINE Q low_nibbles(Q a) { return each_q([&](int i) { return vandq_u8(a.v[i], vdupq_n_u8(15)); }); }
  static SLIPSTREAM_INLINE Q high_nibbles(Q a) { return each_q([&](int i) { return vshrq_n_u8(a.v[i], 4); }); }
  template <int kShift>
  static SLIPSTREAM_INLINE Q with_top(Q nibbles, Q tops) {
    return each_q([&](int i) {
      const uint8x16_t shifted = vshlq_u8(tops.v[i], vdupq_n_s8(-kShift));
      return vorrq_u8(nibbles.v[i], vshlq_n_u8(vandq_u8(shifted, vdupq_n_u8(3)), 4));
    });
  }
  static SLIPSTREAM_INLINE Q repeat16(const int8_t* p) {
    return each_q([&](int) { return vreinterpretq_u8_s8(vld1q_s8(p)); });
  }
  static SLIPSTREAM_INLINE Q look_up(Q table, Q nibbles) {
    return each_q([&](int i) { return vqtbl1q_u8(table.v[i], nibbles.v[i]); });
  }
  static SLIPSTREAM_INLINE Q flip_sign(Q a) { return each_q([&](int i) { return veorq_u8(a.v[i], vdupq_n_u8(128)); }); }
  // Every weight, offset or signed, fits a signed byte.
  static SLIPSTREAM_INLINE I dot(I acc, Q w, const int8_t* x) {
    int32_t quad;
    __builtin_memcpy(&quad, x, 4);
    const int8x16_t v = vreinterpretq_s8_s32(vdupq_n_s32(quad));
    for (int i = 0; i < 4; ++i) acc.v[i] = vdotq_s32(acc.v[i], vreinterpretq_s8_u8(w.v[i]), v);
    return acc;
  }
  static SLIPSTREAM_INLINE I dot_signed(I acc, Q w, const int8_t* x) { return dot(acc, w, x); }
  static SLIPSTREAM_INLINE void prefetch_near(const void* p) { __builtin_prefetch(p, 0, 3); }
  static SLIPSTREAM_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }
  static uint64_t read(const uint8_t* p, size_t bytes) {
    uint64x2_t sum = vdupq_n_u64(0);
    for (size_t i = 0; i + 64 <= bytes; i += 64)
      for (int j = 0; j < 64; j += 16) sum = vaddq_u64(sum, vreinterpretq_u64_u8(vld1q_u8(p + i + j)));
    return vgetq_lane_u64(sum, 0) + vgetq_lane_u64(sum, 1);
  }
};

}  // namespace
}  // namespace slipstream
