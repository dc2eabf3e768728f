// Rows of quantized activations against tiles of a quantized matrix.
#pragma once

#include "elementwise_impl.h"
#include "group_impl.h"

namespace slipstream {
namespace {

// The rows of one group in a row block, from some row on.
struct GroupRows {
  const int8_t* q;
  const float* scale;
  const float* scaled_sum;
  const int32_t* negated_sums;
  int64_t in_block;

  GroupRows(const QuantizedRows& x, int block, int first, int group) : in_block(x.block_rows(block)) {
    const int64_t base = x.block_offset(block) + group * in_block;
    q = x.q + (base + first) * kGroup;
    scale = x.scale + base + first;
    scaled_sum = x.scaled_sum + base + first;
    negated_sums = x.negated_sums + base * kSumKinds + first;
  }
  SLIPSTREAM_INLINE void next_group() {
    q += in_block * kGroup;
    scale += in_block;
    scaled_sum += in_block;
    negated_sums += in_block * kSumKinds;
  }
};

template <Format F>
struct PackedGroup {
  const uint8_t* data;
  template <int kQuad>
  SLIPSTREAM_INLINE Simd::Q quad() const { return unpack_quad<F, kQuad>(data); }
};

struct UnpackedGroup {
  const uint8_t* data;
  template <int kQuad>
  SLIPSTREAM_INLINE Simd::Q quad() const { return Simd::load_q(data + kQuad * kVectorBytes); }
};

// What a dot product over columns of `kind` (0: all, 1, 2: a half) starts with.
template <Format F, class S = Simd>
SLIPSTREAM_INLINE Simd::I dot_start(const GroupRows& x, int row, int kind) {
  if constexpr (kOffset<F> == 0) return Simd::iset1(0);
  const int32_t negated_sum = x.negated_sums[kind * x.in_block + row];
  if constexpr (S::kPairSums) return S::template times<kOffset<F>>(S::iset1(negated_sum));
  return Simd::iset1(negated_sum * kOffset<F>);
}

template <Format F, class S>
constexpr bool kPairSums = S::kPairSums && !kSignedBytes<F>;

// Quads whose products' sums fit in 16 bits, as a power of two.
template <Format F>
constexpr int kRunQuads = F == Format::Q6Super ? 2 : F == Format::Q8Affine ? 4 : 8;

// Adds quads [kFirst, kFirst + kRunQuads) by way of sums in 16 bits.
template <Format F, int kFirst, int kCount, class S, class Weights>
SLIPSTREAM_INLINE void add_run(const Weights& weights, const int8_t* q, Simd::I acc[kCount]) {
  constexpr int kRun = kRunQuads<F>;
  if constexpr (kRun == 2) {
    const Simd::Q w0 = weights.template quad<kFirst>(), w1 = weights.template quad<kFirst + 1>();
    unrolled<kCount>([&](auto r) SLIPSTREAM_INLINE_LAMBDA {
      const int8_t* x = q + r * kGroup + 4 * kFirst;
      acc[r] = S::add_pair_sums(acc[r], S::add(S::pair_sums(w0, x), S::pair_sums(w1, x + 4)));
    });
  } else {
    typename S::PairSums sums[kCount];
    unrolled<kRun>([&](auto j) SLIPSTREAM_INLINE_LAMBDA {
      const Simd::Q w = weights.template quad<kFirst + j>();
      unrolled<kCount>([&](auto r) SLIPSTREAM_INLINE_LAMBDA {
        const auto products = S::pair_sums(w, q + r * kGroup + 4 * (kFirst + j));
        sums[r] = j == 0 ? products : S::add(sums[r], products);
      });
    });
    unrolled<kCount>([&](auto r) SLIPSTREAM_INLINE_LAMBDA { acc[r] = S::add_pair_sums(acc[r], sums[r]); });
  }
}

// Adds the dot products of quads [kBegin, kEnd).
template <Format F, int kBegin, int kEnd, int kCount, class S = Simd, class Weights>
SLIPSTREAM_INLINE void dot_quads(const Weights& weights, const int8_t* q, Simd::I acc[kCount]) {
  if constexpr (kPairSums<F, S>) {
    add_run<F, kBegin, kCount, S>(weights, q, acc);
    constexpr int kNext = kBegin + kRunQuads<F>;
    if constexpr (kNext < kEnd) dot_quads<F, kNext, kEnd, kCount, S>(weights, q, acc);
  } else if constexpr (S::kPairSums) {
    unrolled<kEnd - kBegin>([&](auto j) SLIPSTREAM_INLINE_LAMBDA {
      const Simd::Q w = weights.template quad<kBegin + j>(), magnitude = S::magnitude(w);
      unrolled<kCount>([&](auto r) SLIPSTREAM_INLINE_LAMBDA {
        acc[r] = S::dot_signed(acc[r], w, magnitude, q + r * kGroup + 4 * (kBegin + j));
      });
    });
  } else {
    unrolled<kCount>([&](auto r) SLIPSTREAM_INLINE_LAMBDA {
      unrolled<kEnd - kBegin>([&](auto j) SLIPSTREAM_INLINE_LAMBDA {
        const Simd::Q w = weights.template quad<kBegin + j>();
        const int8_t* x = q + r * kGroup + 4 * (kBegin + j);
        if constexpr (kSignedBytes<F> && S::kSignedDot) {
          acc[r] = S::dot_signed(acc[r], w, x);
        } else {
          acc[r] = S::dot(acc[r], w, x);
        }
      });
    });
  }
}

// Adds a group's products with kCount rows to their totals.
template <Format F, int kCount, class Weights>
SLIPSTREAM_INLINE void fold_group(const Weights& weights, const GroupScales& s, const GroupRows& x,
                                  Simd::F total[kCount]) {
  Simd::I acc[kCount];
  if constexpr (F == Format::Q6Super) {
    Simd::F scaled[kCount];
    for (int r = 0; r < kCount; ++r) acc[r] = dot_start<F>(x, r, 1);
    dot_quads<F, 0, 4, kCount>(weights, x.q, acc);
    for (int r = 0; r < kCount; ++r) scaled[r] = Simd::mul(Simd::to_float(acc[r]), s.first);
    for (int r = 0; r < kCount; ++r) acc[r] = dot_start<F>(x, r, 2);
    dot_quads<F, 4, 8, kCount>(weights, x.q, acc);
    for (int r = 0; r < kCount; ++r) {
      scaled[r] = Simd::fma(Simd::to_float(acc[r]), s.second, scaled[r]);
      total[r] = Simd::fma(scaled[r], Simd::set1(x.scale[r]), total[r]);
    }
  } else {
    for (int r = 0; r < kCount; ++r) acc[r] = dot_start<F>(x, r, 0);
    dot_quads<F, 0, kQuads, kCount>(weights, x.q, acc);
    for (int r = 0; r < kCount; ++r) {
      const Simd::F scaled = Simd::mul(Simd::to_float(acc[r]), s.first);
      total[r] = Simd::fma(scaled, Simd::set1(x.scale[r]), total[r]);
      if constexpr (kAffine<F>) {
        total[r] = Simd::fma(s.second, Simd::set1(x.scaled_sum[r]), total[r]);
      }
    }
  }
}

// Adds a row's tile to the output. The remainders of rounded rows come after all of these.
inline void finish_row(Simd::F total, int row, int tile, int matrix_rows, const LinearOutput& to) {
  const bool remainder = row >= to.rows;
  if (remainder) row -= to.rows;
  const int column = tile * kTileRows;
  const int n = matrix_rows - column < kTileRows ? matrix_rows - column : kTileRows;
  float* out = to.out + row * to.stride + column;
  if (to.bias != nullptr && !remainder) total = Simd::add(total, Simd::load_n(to.bias + column, n));
  if (to.accumulate || remainder) total = Simd::add(Simd::load_n(out, n), total);
  Simd::store_n(out, nan_if_infinite(total), n);
}

// Rows [first, first + kCount) of one row block against one tile.
template <Format F, int kCount>
void quantized_rows(const Matrix& m, int tile, const QuantizedRows& x, int block, int first,
                    const LinearOutput& to) {
  using L = Layout<F>;
  const uint8_t* data = m.data + tile * m.tile_bytes();
  GroupRows rows(x, block, first, 0);
  Simd::F total[kCount];
  for (int r = 0; r < kCount; ++r) total[r] = Simd::zero();
  const int groups = m.groups();
  for (int g = 0; g < groups; g += L::kGroups) {
    const BlockScales<F> super(data);
    const uint8_t* group = data + L::kHeader;
    prefetch_ahead(data, L::kHeader);
    for (int i = 0; i < L::kGroups; ++i, group += L::kBytes) {
      prefetch_ahead(group, L::kBytes);
      const GroupScales s = group_scales<F>(data, i, super);
      fold_group<F, kCount>(PackedGroup<F>{group}, s, rows, total);
      rows.next_group();
    }
    data = group;
  }
  for (int r = 0; r < kCount; ++r) {
    finish_row(total[r], block * kRowBlock + first + r, tile, m.rows, to);
  }
}

// From how many rows on it pays to unpack a tile first (measured on Zen 4).
template <Format F>
constexpr int kUnpackFrom = F == Format::Q6Super ? Simd::kRows + 1 : 32;
template <Format F>
constexpr bool kCanUnpack = Simd::kPairSums && is_quantized(F) && F != Format::Q8Affine && !kSignedBytes<F>;

// Groups of a tile, unpacked once for the many rows that read them.
struct UnpackedGroups {
  static constexpr int kMost = 8;  // whole blocks of every format
  alignas(64) uint8_t bytes[kMost][kGroup * kTileRows];
  alignas(64) float first[kMost][kTileRows];
  alignas(64) float second[kMost][kTileRows];
};

template <Format F, class S = Simd>
void unpack_groups(const uint8_t* data, int groups, UnpackedGroups& to) {
  using L = Layout<F>;
  for (int g = 0; g < groups;) {
    const BlockScales<F> super(data);
    const uint8_t* group = data + L::kHeader;
    prefetch_ahead(data, L::kHeader);
    for (int i = 0; i < L::kGroups; ++i, ++g, group += L::kBytes) {
      prefetch_ahead(group, L::kBytes);
      const GroupScales s = group_scales<F>(data, i, super);
      Simd::store(to.first[g], s.first);
      Simd::store(to.second[g], s.second);
      unrolled<kQuads>([&](auto j) SLIPSTREAM_INLINE_LAMBDA {
        S::store_q(to.bytes[g] + j * kVectorBytes, unpack_quad<F, j>(group));
      });
    }
    data = group;
  }
}

// Adds products of `groups` groups with rows [first, first + kCount) of a block to totals[row][16].
template <Format F, int kCount>
void unpacked_rows(const UnpackedGroups& w, int groups, GroupRows rows, float* totals) {
  Simd::F total[kCount];
  for (int r = 0; r < kCount; ++r) total[r] = Simd::load(totals + r * kTileRows);
  for (int g = 0; g < groups; ++g) {
    const GroupScales s{Simd::load(w.first[g]), Simd::load(w.second[g])};
    fold_group<F, kCount>(UnpackedGroup{w.bytes[g]}, s, rows, total);
    rows.next_group();
  }
  for (int r = 0; r < kCount; ++r) Simd::store(totals + r * kTileRows, total[r]);
}

template <Format F, int kCount>
void exact_unpacked_rows(int count, const UnpackedGroups& w, int groups, const GroupRows& rows,
                         float* totals) {
  if constexpr (kCount > 0) {
    if (count == kCount) return unpacked_rows<F, kCount>(w, groups, rows, totals);
    exact_unpacked_rows<F, kCount - 1>(count, w, groups, rows, totals);
  }
}

// Row blocks [begin, end) against one tile that is unpacked as it goes.
template <Format F>
void many_rows(const Matrix& m, int tile, const QuantizedRows& x, int begin, int end, float* totals,
               const LinearOutput& to) {
  constexpr int kStepBytes = UnpackedGroups::kMost / Layout<F>::kGroups * block_bytes(F);
  constexpr int kBlockTotals = kRowBlock * kTileRows;
  UnpackedGroups w;
  __builtin_memset(totals, 0, sizeof(float) * static_cast<size_t>((end - begin) * kBlockTotals));
  const int groups = m.groups();
  const uint8_t* data = m.data + tile * m.tile_bytes();
  for (int g = 0; g < groups; g += UnpackedGroups::kMost, data += kStepBytes) {
    const int count = groups - g < UnpackedGroups::kMost ? groups - g : UnpackedGroups::kMost;
    unpack_groups<F>(data, count, w);
    for (int block = begin; block < end; ++block) {
      const int rows = x.block_rows(block);
      for (int r = 0; r < rows; r += Simd::kRows) {
        exact_unpacked_rows<F, Simd::kRows>(rows - r < Simd::kRows ? rows - r : Simd::kRows, w, count,
                                            GroupRows(x, block, r, g),
                                            totals + (block - begin) * kBlockTotals + r * kTileRows);
      }
    }
  }
  for (int row = begin * kRowBlock; row < end * kRowBlock && row < x.rows; ++row) {
    finish_row(Simd::load(totals + (row - begin * kRowBlock) * kTileRows), row, tile, m.rows, to);
  }
}

}  // namespace
}  // namespace slipstream
