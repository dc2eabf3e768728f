// AVX512 (F, BW, DQ, VL) with VNNI.
#pragma once

#include <immintrin.h>

#include "half.h"
#include "kernels.h"

namespace slipstream {
namespace {

struct Simd {
  using F = __m512;
  using I = __m512i;
  using Q = __m512i;
  static constexpr int kRows = 8;
  static constexpr bool kSignedDot = false;
  static constexpr bool kPairSums = false;

  static SLIPSTREAM_INLINE __mmask16 first(int n) { return static_cast<__mmask16>(n >= 16 ? 0xffff : (1 << n) - 1); }

  static SLIPSTREAM_INLINE F zero() { return _mm512_setzero_ps(); }
  static SLIPSTREAM_INLINE F set1(float x) { return _mm512_set1_ps(x); }
  static SLIPSTREAM_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
  static SLIPSTREAM_INLINE F load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static SLIPSTREAM_INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a); }
  static SLIPSTREAM_INLINE void store_n(float* p, F a, int n) { _mm512_mask_storeu_ps(p, first(n), a); }
  static SLIPSTREAM_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
  static SLIPSTREAM_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static SLIPSTREAM_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static SLIPSTREAM_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
  static SLIPSTREAM_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static SLIPSTREAM_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
  static SLIPSTREAM_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
  static SLIPSTREAM_INLINE F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT); }
  static SLIPSTREAM_INLINE F zero_below(F x, F limit, F value) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), value);
  }
  static SLIPSTREAM_INLINE F times_pow2(F a, F n) { return _mm512_scalef_ps(a, n); }
  static SLIPSTREAM_INLINE F window(F a, int from, int last, float outside) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 keep = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(from)) &
                           _mm512_cmple_epi32_mask(lane, _mm512_set1_epi32(last));
    return _mm512_mask_mov_ps(_mm512_set1_ps(outside), keep, a);
  }
  static SLIPSTREAM_INLINE float hmax(F a) { return _mm512_reduce_max_ps(a); }
  static SLIPSTREAM_INLINE float largest_magnitude(F a, F b) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512i larger = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a), magnitude),
                                            _mm512_and_si512(_mm512_castps_si512(b), magnitude));
    return bits_float(static_cast<uint32_t>(_mm512_reduce_max_epi32(larger)));
  }
  static SLIPSTREAM_INLINE float hsum(F a) { return _mm512_reduce_add_ps(a); }
  static SLIPSTREAM_INLINE F load_half(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static SLIPSTREAM_INLINE F load_bfloat(const uint16_t* p) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
  }
  static SLIPSTREAM_INLINE F load_u8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static SLIPSTREAM_INLINE F load_s8(const int8_t* p) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static SLIPSTREAM_INLINE int quantize(F a, int8_t* out) {
    const __m512i rounded = _mm512_cvtps_epi32(a);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(rounded));
    return _mm512_reduce_add_epi32(rounded);
  }

  static SLIPSTREAM_INLINE I iset1(int32_t x) { return _mm512_set1_epi32(x); }
  static SLIPSTREAM_INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }

  static SLIPSTREAM_INLINE Q load_q(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static SLIPSTREAM_INLINE Q low_nibbles(Q a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
  static SLIPSTREAM_INLINE Q high_nibbles(Q a) { return low_nibbles(_mm512_srli_epi16(a, 4)); }
  template <int kShift>
  static SLIPSTREAM_INLINE Q with_top(Q nibbles, Q tops) {
    const __m512i moved = kShift < 4 ? _mm512_slli_epi16(tops, kShift < 4 ? 4 - kShift : 0)
                                     : _mm512_srli_epi16(tops, kShift < 4 ? 0 : kShift - 4);
    // (moved & 0x30) | nibbles
    return _mm512_ternarylogic_epi32(moved, _mm512_set1_epi8(0x30), nibbles, 0xea);
  }
  static SLIPSTREAM_INLINE Q repeat16(const int8_t* p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static SLIPSTREAM_INLINE Q look_up(Q table, Q nibbles) { return _mm512_shuffle_epi8(table, nibbles); }
  static SLIPSTREAM_INLINE Q flip_sign(Q a) { return _mm512_xor_si512(a, _mm512_set1_epi8(-128)); }
  static SLIPSTREAM_INLINE I dot(I acc, Q w, const int8_t* x) {
    int32_t quad;
    __builtin_memcpy(&quad, x, 4);
    return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(quad));
  }
  static SLIPSTREAM_INLINE I dot_signed(I acc, Q w, const int8_t* x) { return dot(acc, flip_sign(w), x); }
  static SLIPSTREAM_INLINE void prefetch_near(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
  static SLIPSTREAM_INLINE void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
  static uint64_t read(const uint8_t* p, size_t bytes) {
    __m512i sum = _mm512_setzero_si512();
    for (size_t i = 0; i + 256 <= bytes; i += 256) {
      for (int j = 0; j < 256; j += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(p + i + j + 4096), _MM_HINT_T0);
        sum = _mm512_add_epi64(sum, _mm512_loadu_si512(p + i + j));
      }
    }
    return static_cast<uint64_t>(_mm512_reduce_add_epi64(sum));
  }
};

}  // namespace
}  // namespace slipstream
