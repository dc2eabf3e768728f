// Paged attention over the including variant's Simd: scores, softmax, weighted values.
//
// A query's sums run over absolute positions in one fixed order and masked positions add exact
// zeros, so its result does not depend on the other queries, the chunk or the block numbers.
#pragma once

#include "elementwise_impl.h"

namespace slipstream {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();

template <KvType T>
Simd::F load_kv(const void* base, int64_t index) {
  if constexpr (T == KvType::F32) return Simd::load(static_cast<const float*>(base) + index);
  return Simd::load_bfloat(static_cast<const uint16_t*>(base) + index);
}

// The KV blocks that some query of the task attends to, and the last position that one does.
struct BlockRange {
  int begin, end, last;
};

inline int first_position(const AttentionTask& t, int query) {
  const int first = t.position[query] - t.window + 1;
  return t.window == 0 || first < 0 ? 0 : first;
}

inline BlockRange block_range(const AttentionTask& t) {
  int low = first_position(t, 0), high = t.position[0];
  for (int i = 1; i < t.queries; ++i) {
    const int first = first_position(t, i);
    low = first < low ? first : low;
    high = t.position[i] > high ? t.position[i] : high;
  }
  return {low / t.kv->block_size, high / t.kv->block_size + 1, high};
}

// Scores of kVectors x 16 tokens of a block from token `v` on, -inf where masked.
template <KvType T, int kQueries, int kVectors>
SLIPSTREAM_INLINE void block_scores(const AttentionTask& t, int block, int v, int64_t score_stride,
                                    float* scores) {
  const KvLayer& kv = *t.kv;
  const int64_t keys = kv.key_offset(t.block_table[block], t.kv_head) + v;
  Simd::F acc[kVectors][kQueries];
  for (int j = 0; j < kVectors; ++j) {
    for (int i = 0; i < kQueries; ++i) acc[j][i] = Simd::zero();
  }
  for (int d = 0; d < kv.head_dim; ++d) {
    Simd::F k[kVectors];
    for (int j = 0; j < kVectors; ++j) {
      k[j] = load_kv<T>(kv.keys, keys + int64_t{d} * kv.padded_block + 16 * j);
    }
    for (int i = 0; i < kQueries; ++i) {
      const Simd::F q = Simd::set1(t.q[i][d]);
      for (int j = 0; j < kVectors; ++j) acc[j][i] = Simd::fma(k[j], q, acc[j][i]);
    }
  }
  for (int j = 0; j < kVectors; ++j) {
    const int start = block * kv.block_size + v + 16 * j;
    const int in_block = kv.block_size - v - 16 * j - 1;
    for (int i = 0; i < kQueries; ++i) {
      const int last = t.position[i] - start < in_block ? t.position[i] - start : in_block;
      const Simd::F s = nan_if_infinite(Simd::mul(acc[j][i], Simd::set1(t.scale)));
      Simd::store(scores + i * score_stride + 16 * j,
                  Simd::window(s, first_position(t, i) - start, last, kMinusInfinity));
    }
  }
}

// scores[query][vector of 16 tokens], -inf where masked.
template <KvType T, int kQueries>
void attention_scores(const AttentionTask& t, BlockRange range, int64_t score_stride) {
  const int padded = t.kv->padded_block;
  for (int b = range.begin; b < range.end; ++b) {
    float* scores = t.scores + int64_t{b - range.begin} * padded;
    int v = 0;
    for (; v + 32 <= padded; v += 32) {
      block_scores<T, kQueries, 2>(t, b, v, score_stride, scores + v);
    }
    if (v < padded) block_scores<T, kQueries, 1>(t, b, v, score_stride, scores + v);
  }
}

// Turns scores into exp(score - max) in place; returns their sum, which holds every NaN although the
// largest may lack one.
inline float softmax_numerators(float* scores, int64_t n) {
  Simd::F largest = Simd::set1(kMinusInfinity);
  for (int64_t i = 0; i < n; i += 16) largest = Simd::max(largest, Simd::load(scores + i));
  const Simd::F shift = Simd::set1(Simd::hmax(largest));
  Simd::F sum = Simd::zero();
  for (int64_t i = 0; i < n; i += 16) {
    const Simd::F e = exp16(Simd::sub(Simd::load(scores + i), shift));
    Simd::store(scores + i, e);
    sum = Simd::add(sum, e);
  }
  return Simd::hsum(sum);
}

template <KvType T, int kQueries>
void weighted_values(const AttentionTask& t, BlockRange range, int64_t score_stride,
                     const float* inverse_sums) {
  const KvLayer& kv = *t.kv;
  for (int d = 0; d < kv.head_dim; d += 32) {
    const int left = kv.head_dim - d;
    const bool two = left > 16;
    Simd::F low[kQueries], high[kQueries];
    for (int i = 0; i < kQueries; ++i) low[i] = high[i] = Simd::zero();
    for (int b = range.begin; b < range.end; ++b) {
      const int64_t values = kv.value_offset(t.block_table[b], t.kv_head) + d;
      const float* weights = t.scores + int64_t{b - range.begin} * kv.padded_block;
      // Slots behind the last position may hold what another request left, even a NaN.
      const int left_to_read = range.last - b * kv.block_size + 1;
      const int tokens = left_to_read < kv.block_size ? left_to_read : kv.block_size;
      for (int j = 0; j < tokens; ++j) {
        const int64_t at = values + int64_t{j} * kv.value_stride();
        const Simd::F v0 = load_kv<T>(kv.values, at);
        const Simd::F v1 = two ? load_kv<T>(kv.values, at + 16) : v0;
        for (int i = 0; i < kQueries; ++i) {
          const Simd::F p = Simd::set1(weights[i * score_stride + j]);
          low[i] = Simd::fma(v0, p, low[i]);
          high[i] = Simd::fma(v1, p, high[i]);
        }
      }
    }
    for (int i = 0; i < kQueries; ++i) {
      const Simd::F scale = Simd::set1(inverse_sums[i]);
      Simd::store_n(t.out[i] + d, Simd::mul(low[i], scale), left < 16 ? left : 16);
      if (two) Simd::store_n(t.out[i] + d + 16, Simd::mul(high[i], scale), lanes_left(left, 16));
    }
  }
}

template <KvType T, int kQueries>
void attention_exact(const AttentionTask& t) {
  if constexpr (kQueries > 0) {
    if (t.queries != kQueries) return attention_exact<T, kQueries - 1>(t);
    const BlockRange range = block_range(t);
    const int64_t stride = int64_t{range.end - range.begin} * t.kv->padded_block;
    attention_scores<T, kQueries>(t, range, stride);
    float inverse_sums[kQueries];
    for (int i = 0; i < kQueries; ++i) {
      inverse_sums[i] = 1.0f / softmax_numerators(t.scores + i * stride, stride);
    }
    weighted_values<T, kQueries>(t, range, stride, inverse_sums);
  }
}

inline void attention(const AttentionTask& t) {
  if (t.kv->type == KvType::F32) return attention_exact<KvType::F32, kMaxQueries>(t);
  return attention_exact<KvType::BF16, kMaxQueries>(t);
}

}  // namespace
}  // namespace slipstream
