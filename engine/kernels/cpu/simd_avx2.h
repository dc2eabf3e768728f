// AVX2 with FMA and F16C: sixteen lanes are two vectors of eight.
#pragma once

#include <immintrin.h>

#include "half.h"
#include "kernels.h"

namespace slipstream {
namespace {

struct Simd {
  struct F { __m256 a, b; };
  struct I { __m256i a, b; };
  struct Q { __m256i a, b; };
  static constexpr int kRows = 4;
  static constexpr bool kSignedDot = true;
  static constexpr bool kPairSums = true;

  static SLIPSTREAM_INLINE __m256i lanes(int from) {
    return _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(from));
  }
  static SLIPSTREAM_INLINE __m256i below(int from, int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes(from)); }

  static SLIPSTREAM_INLINE F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static SLIPSTREAM_INLINE F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static SLIPSTREAM_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static SLIPSTREAM_INLINE F load_n(const float* p, int n) {
    return {_mm256_maskload_ps(p, below(0, n)), _mm256_maskload_ps(p + 8, below(8, n))};
  }
  static SLIPSTREAM_INLINE void store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
  }
  static SLIPSTREAM_INLINE void store_n(float* p, F x, int n) {
    _mm256_maskstore_ps(p, below(0, n), x.a);
    _mm256_maskstore_ps(p + 8, below(8, n), x.b);
  }
  static SLIPSTREAM_INLINE F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  static SLIPSTREAM_INLINE F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
  static SLIPSTREAM_INLINE F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  static SLIPSTREAM_INLINE F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
  static SLIPSTREAM_INLINE F fma(F x, F y, F z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
  }
  static SLIPSTREAM_INLINE F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
  static SLIPSTREAM_INLINE F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
  static SLIPSTREAM_INLINE F round(F x) {
    constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, kMode), _mm256_round_ps(x.b, kMode)};
  }
  static SLIPSTREAM_INLINE F zero_below(F x, F limit, F value) {
    return {_mm256_and_ps(_mm256_cmp_ps(x.a, limit.a, _CMP_NLT_UQ), value.a),
            _mm256_and_ps(_mm256_cmp_ps(x.b, limit.b, _CMP_NLT_UQ), value.b)};
  }
  static SLIPSTREAM_INLINE __m256 pow2(__m256 n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  }
  static SLIPSTREAM_INLINE F times_pow2(F x, F n) {
    return {_mm256_mul_ps(x.a, pow2(n.a)), _mm256_mul_ps(x.b, pow2(n.b))};
  }
  static SLIPSTREAM_INLINE __m256 window8(__m256 x, int base, int from, int last, __m256 outside) {
    const __m256i out = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(from), lanes(base)),
                                        _mm256_cmpgt_epi32(lanes(base), _mm256_set1_epi32(last)));
    return _mm256_blendv_ps(x, outside, _mm256_castsi256_ps(out));
  }
  static SLIPSTREAM_INLINE F window(F x, int from, int last, float outside) {
    const __m256 other = _mm256_set1_ps(outside);
    return {window8(x.a, 0, from, last, other), window8(x.b, 8, from, last, other)};
  }
  static SLIPSTREAM_INLINE float hmax(F x) {
    const __m256 m8 = _mm256_max_ps(x.a, x.b);
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(m8), _mm256_extractf128_ps(m8, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
  }
  static SLIPSTREAM_INLINE float largest_magnitude(F x, F y) {
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    const __m256i m8 = _mm256_max_epi32(
        _mm256_max_epi32(_mm256_castps_si256(_mm256_and_ps(x.a, magnitude)),
                         _mm256_castps_si256(_mm256_and_ps(x.b, magnitude))),
        _mm256_max_epi32(_mm256_castps_si256(_mm256_and_ps(y.a, magnitude)),
                         _mm256_castps_si256(_mm256_and_ps(y.b, magnitude))));
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(m8), _mm256_extracti128_si256(m8, 1));
    m = _mm_max_epi32(m, _mm_unpackhi_epi64(m, m));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 1));
    return bits_float(static_cast<uint32_t>(_mm_cvtsi128_si32(m)));
  }
  static SLIPSTREAM_INLINE float hsum(F x) {
    const __m256 s8 = _mm256_add_ps(x.a, x.b);
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  static SLIPSTREAM_INLINE __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static SLIPSTREAM_INLINE __m128i load64(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
  static SLIPSTREAM_INLINE F load_half(const uint16_t* p) {
    return {_mm256_cvtph_ps(load128(p)), _mm256_cvtph_ps(load128(p + 8))};
  }
  static SLIPSTREAM_INLINE __m256 bfloat8(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p)), 16));
  }
  static SLIPSTREAM_INLINE F load_bfloat(const uint16_t* p) { return {bfloat8(p), bfloat8(p + 8)}; }
  static SLIPSTREAM_INLINE F load_u8(const uint8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load64(p))),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load64(p + 8)))};
  }
  static SLIPSTREAM_INLINE F load_s8(const int8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load64(p))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load64(p + 8)))};
  }
  static SLIPSTREAM_INLINE int quantize(F x, int8_t* out) {
    const __m256i ia = _mm256_cvtps_epi32(x.a), ib = _mm256_cvtps_epi32(x.b);
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(ia, ib), 0xd8);
    const __m128i bytes =
        _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
    const __m256i s8 = _mm256_add_epi32(ia, ib);
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(s8), _mm256_extracti128_si256(s8, 1));
    s = _mm_add_epi32(s, _mm_unpackhi_epi64(s, s));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 1)));
  }

  static SLIPSTREAM_INLINE I iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  template <int kFactor>
  static SLIPSTREAM_INLINE I times(I x) {
    constexpr int kShift = __builtin_ctz(kFactor);
    return {_mm256_slli_epi32(x.a, kShift), _mm256_slli_epi32(x.b, kShift)};
  }
  static SLIPSTREAM_INLINE F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }

  static SLIPSTREAM_INLINE __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static SLIPSTREAM_INLINE Q load_q(const uint8_t* p) { return {load256(p), load256(p + 32)}; }
  static SLIPSTREAM_INLINE void store_q(uint8_t* p, Q x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), x.b);
  }
  static SLIPSTREAM_INLINE Q low_nibbles(Q x) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
  }
  static SLIPSTREAM_INLINE Q high_nibbles(Q x) {
    return low_nibbles({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)});
  }
  template <int kShift>
  static SLIPSTREAM_INLINE __m256i top(__m256i nibbles, __m256i tops) {
    if constexpr (kShift < 4) tops = _mm256_slli_epi16(tops, 4 - kShift);
    if constexpr (kShift > 4) tops = _mm256_srli_epi16(tops, kShift - 4);
    return _mm256_or_si256(nibbles, _mm256_and_si256(tops, _mm256_set1_epi8(0x30)));
  }
  template <int kShift>
  static SLIPSTREAM_INLINE Q with_top(Q nibbles, Q tops) {
    return {top<kShift>(nibbles.a, tops.a), top<kShift>(nibbles.b, tops.b)};
  }
  static SLIPSTREAM_INLINE Q repeat16(const int8_t* p) {
    const __m256i twice = _mm256_broadcastsi128_si256(load128(p));
    return {twice, twice};
  }
  static SLIPSTREAM_INLINE Q look_up(Q table, Q nibbles) {
    return {_mm256_shuffle_epi8(table.a, nibbles.a), _mm256_shuffle_epi8(table.b, nibbles.b)};
  }
  static SLIPSTREAM_INLINE Q flip_sign(Q x) {
    const __m256i sign = _mm256_set1_epi8(-128);
    return {_mm256_xor_si256(x.a, sign), _mm256_xor_si256(x.b, sign)};
  }
  static SLIPSTREAM_INLINE __m256i quads(const int8_t* x) {
    int32_t quad;
    __builtin_memcpy(&quad, x, 4);
    return _mm256_set1_epi32(quad);
  }
  // Products of unsigned weights, summed in pairs of columns and then of quads, in 16 bits.
  struct PairSums { __m256i a, b; };
  static SLIPSTREAM_INLINE PairSums pair_sums(Q w, const int8_t* x) {
    const __m256i v = quads(x);
    return {_mm256_maddubs_epi16(w.a, v), _mm256_maddubs_epi16(w.b, v)};
  }
  // As written: a tree of additions, which compilers would make of them, needs more registers than
  // there are.
  static SLIPSTREAM_INLINE __m256i in_order(__m256i x) {
    __asm__("" : "+x"(x));
    return x;
  }
  static SLIPSTREAM_INLINE PairSums add(PairSums x, PairSums y) {
    return {in_order(_mm256_add_epi16(x.a, y.a)), in_order(_mm256_add_epi16(x.b, y.b))};
  }
  static SLIPSTREAM_INLINE __m256i add_pairs(__m256i acc, __m256i x) {
    return in_order(_mm256_add_epi32(acc, _mm256_madd_epi16(x, _mm256_set1_epi16(1))));
  }
  static SLIPSTREAM_INLINE I add_pair_sums(I acc, PairSums x) {
    return {add_pairs(acc.a, x.a), add_pairs(acc.b, x.b)};
  }
  static SLIPSTREAM_INLINE Q magnitude(Q w) { return {_mm256_abs_epi8(w.a), _mm256_abs_epi8(w.b)}; }
  // -128 <= w, -127 <= x, so that the sums of pairs stay below 2^15.
  static SLIPSTREAM_INLINE I dot_signed(I acc, Q w, Q magnitude, const int8_t* x) {
    const __m256i v = quads(x);
    return {add_pairs(acc.a, _mm256_maddubs_epi16(magnitude.a, _mm256_sign_epi8(v, w.a))),
            add_pairs(acc.b, _mm256_maddubs_epi16(magnitude.b, _mm256_sign_epi8(v, w.b)))};
  }
  static SLIPSTREAM_INLINE void prefetch_near(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
  static SLIPSTREAM_INLINE void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
  static uint64_t read(const uint8_t* p, size_t bytes) {
    __m256i sum = _mm256_setzero_si256();
    for (size_t i = 0; i + 64 <= bytes; i += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(p + i + 4096), _MM_HINT_T0);
      sum = _mm256_add_epi64(sum, _mm256_add_epi64(load256(p + i), load256(p + i + 32)));
    }
    return static_cast<uint64_t>(_mm256_extract_epi64(sum, 0) + _mm256_extract_epi64(sum, 1) +
                                 _mm256_extract_epi64(sum, 2) + _mm256_extract_epi64(sum, 3));
  }
};

}  // namespace
}  // namespace slipstream
