// Packed linear layers over the including variant's Simd.
//
// The integer dot product of a group is exact and the float fold of a row's groups is one fixed
// sequence of operations, so a row's result has the same bits whatever rows stand beside it.
#pragma once

#include "elementwise_impl.h"
#include "kernels.h"

namespace slipstream {
namespace {

// How far a kernel fetches ahead of the weights it reads, into the first and the second cache: the
// first has too few fill buffers to hide all of the memory's latency (measured, both together).
constexpr int kNearBytes = 2048;
constexpr int kFarBytes = 8192;

SLIPSTREAM_INLINE void prefetch_ahead(const uint8_t* data, int bytes) {
  for (int b = 0; b < bytes; b += kVectorBytes) Simd::prefetch_near(data + b + kNearBytes);
  for (int b = 0; b < bytes; b += kVectorBytes) Simd::prefetch_far(data + b + kFarBytes);
}

struct GroupScales {
  Simd::F first;   // scale of the group, or of its low half
  Simd::F second;  // minimum, or the scale of the high half
};

template <Format F>
struct Unpack;

template <Format F>
constexpr bool kAffine = F == Format::Q4Affine || F == Format::Q4Super || F == Format::Q8Affine;

template <Format F>
constexpr bool kTable = F == Format::Q4Table || F == Format::Q4TableSuper;

// Weights that are signed bytes, unless the variant's dot product wants them unsigned.
template <Format F>
constexpr bool kSignedBytes = F == Format::Q8Symmetric || kTable<F>;

// What unsigned weights are above the signed ones, as a power of two.
template <Format F>
constexpr int kOffset = F == Format::Q4Symmetric                  ? 8
                        : F == Format::Q6Super                    ? 32
                        : kSignedBytes<F> && !Simd::kSignedDot    ? 128
                                                                  : 0;

SLIPSTREAM_INLINE void unpack_nibbles(const uint8_t* data, Simd::Q w[kQuads]) {
  for (int j = 0; j < 4; ++j) {
    const Simd::Q pair = Simd::load_q(data + j * kVectorBytes);
    w[2 * j] = Simd::low_nibbles(pair);
    w[2 * j + 1] = Simd::high_nibbles(pair);
  }
}

// A block's scales that do not change from group to group.
template <Format F>
struct BlockScales {
  explicit BlockScales(const uint8_t*) {}
};

template <>
struct BlockScales<Format::Q4Super> {
  Simd::F scale, minimum;
  explicit BlockScales(const uint8_t* block)
      : scale(Simd::load_half(reinterpret_cast<const uint16_t*>(block))),
        minimum(Simd::sub(Simd::zero(),
                          Simd::load_half(reinterpret_cast<const uint16_t*>(block) + 16))) {}
};

template <>
struct BlockScales<Format::Q6Super> {
  Simd::F scale;
  explicit BlockScales(const uint8_t* block)
      : scale(Simd::load_half(reinterpret_cast<const uint16_t*>(block))) {}
};

template <>
struct BlockScales<Format::Q4TableSuper> : BlockScales<Format::Q6Super> {
  using BlockScales<Format::Q6Super>::BlockScales;
};

template <Format F>
SLIPSTREAM_INLINE GroupScales group_scales(const uint8_t* block, int group, const BlockScales<F>& super) {
  const uint16_t* half = reinterpret_cast<const uint16_t*>(block);
  const float* single = reinterpret_cast<const float*>(block);
  (void)super;
  if constexpr (F == Format::Q4Affine) {
    return {Simd::load_half(half), Simd::load_half(half + 16)};
  } else if constexpr (F == Format::Q8Affine) {
    return {Simd::load(single), Simd::load(single + 16)};
  } else if constexpr (F == Format::Q4Super) {
    const uint8_t* small = block + 64 + group * 32;
    return {Simd::mul(Simd::load_u8(small), super.scale),
            Simd::mul(Simd::load_u8(small + 16), super.minimum)};
  } else if constexpr (F == Format::Q6Super) {
    const int8_t* small = reinterpret_cast<const int8_t*>(block + 64 + group * 32);
    return {Simd::mul(Simd::load_s8(small), super.scale),
            Simd::mul(Simd::load_s8(small + 16), super.scale)};
  } else if constexpr (F == Format::Q4TableSuper) {
    const int8_t* small = reinterpret_cast<const int8_t*>(block + 64 + group * 32);
    return {Simd::mul(Simd::load_s8(small), super.scale), Simd::zero()};
  } else {
    return {Simd::load_half(half + 16 * group), Simd::zero()};
  }
}

template <Format F>
SLIPSTREAM_INLINE void unpack_group(const uint8_t* data, Simd::Q w[kQuads]) {
  if constexpr (F == Format::Q8Symmetric || F == Format::Q8Affine) {
    for (int j = 0; j < kQuads; ++j) {
      w[j] = Simd::load_q(data + j * kVectorBytes);
      if constexpr (kOffset<F> == 128) w[j] = Simd::flip_sign(w[j]);
    }
  } else {
    unpack_nibbles(data, w);
    if constexpr (kTable<F>) {
      Simd::Q levels = Simd::repeat16(kLevels);
      if constexpr (kOffset<F> == 128) levels = Simd::flip_sign(levels);
      for (int j = 0; j < kQuads; ++j) w[j] = Simd::look_up(levels, w[j]);
    }
    if constexpr (F == Format::Q6Super) {
      for (int half = 0; half < 2; ++half) {
        const Simd::Q tops = Simd::load_q(data + (4 + half) * kVectorBytes);
        Simd::Q* v = w + 4 * half;
        v[0] = Simd::with_top<0>(v[0], tops);
        v[1] = Simd::with_top<2>(v[1], tops);
        v[2] = Simd::with_top<4>(v[2], tops);
        v[3] = Simd::with_top<6>(v[3], tops);
      }
    }
  }
}

template <Format F>
SLIPSTREAM_INLINE Simd::I dot_start(const int32_t* negated_sum) {
  if constexpr (kOffset<F> == 0) return Simd::iset1(0);
  return Simd::iset1(*negated_sum * kOffset<F>);
}

template <Format F>
SLIPSTREAM_INLINE Simd::I dot_quads(Simd::I acc, const Simd::Q* w, int begin, int end, const int8_t* x) {
  for (int j = begin; j < end; ++j) {
    if constexpr (kSignedBytes<F> && Simd::kSignedDot) {
      acc = Simd::dot_signed(acc, w[j], x + 4 * j);
    } else {
      acc = Simd::dot(acc, w[j], x + 4 * j);
    }
  }
  return acc;
}

// The scale, sums and quantized columns of one row and group.
struct GroupInput {
  const int8_t* q;
  float scale;
  float scaled_sum;
  const int32_t* negated_sums;
  int64_t sums_stride;
};

template <Format F>
SLIPSTREAM_INLINE Simd::F fold_group(Simd::F total, const Simd::Q w[kQuads], const GroupScales& s,
                   const GroupInput& x) {
  if constexpr (F == Format::Q6Super) {
    const Simd::I low = dot_quads<F>(dot_start<F>(x.negated_sums + x.sums_stride), w, 0, 4, x.q);
    const Simd::I high =
        dot_quads<F>(dot_start<F>(x.negated_sums + 2 * x.sums_stride), w, 4, 8, x.q);
    const Simd::F scaled = Simd::fma(Simd::to_float(high), s.second,
                                     Simd::mul(Simd::to_float(low), s.first));
    return Simd::fma(scaled, Simd::set1(x.scale), total);
  } else {
    const Simd::I acc = dot_quads<F>(dot_start<F>(x.negated_sums), w, 0, kQuads, x.q);
    total = Simd::fma(Simd::mul(Simd::to_float(acc), s.first), Simd::set1(x.scale), total);
    if constexpr (kAffine<F>) total = Simd::fma(s.second, Simd::set1(x.scaled_sum), total);
    return total;
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
  const int in_block = x.block_rows(block);
  const int64_t base = x.block_offset(block);
  const int8_t* q = x.q + base * kGroup + first * kGroup;
  const float* scale = x.scale + base + first;
  const float* scaled_sum = x.scaled_sum + base + first;
  const int32_t* sums = x.negated_sums + base * kSumKinds + first;
  Simd::F total[kCount];
  for (int r = 0; r < kCount; ++r) total[r] = Simd::zero();
  const int groups = m.groups();
  for (int g = 0; g < groups; g += L::kGroups) {
    const BlockScales<F> super(data);
    const uint8_t* group = data + L::kHeader;
    prefetch_ahead(data, L::kHeader);
    for (int i = 0; i < L::kGroups; ++i, group += L::kBytes) {
      prefetch_ahead(group, L::kBytes);
      Simd::Q w[kQuads];
      unpack_group<F>(group, w);
      const GroupScales s = group_scales<F>(data, i, super);
      for (int r = 0; r < kCount; ++r) {
        total[r] = fold_group<F>(total[r], w, s,
                                 {q + r * kGroup, scale[r], scaled_sum[r], sums + r, in_block});
      }
      q += in_block * kGroup;
      scale += in_block;
      scaled_sum += in_block;
      sums += in_block * kSumKinds;
    }
    data = group;
  }
  for (int r = 0; r < kCount; ++r) {
    finish_row(total[r], block * kRowBlock + first + r, tile, m.rows, to);
  }
}

template <Format F>
Simd::F load_columns(const uint8_t* p) {
  if constexpr (F == Format::F32) return Simd::load(reinterpret_cast<const float*>(p));
  if constexpr (F == Format::F16) return Simd::load_half(reinterpret_cast<const uint16_t*>(p));
  if constexpr (F == Format::BF16) return Simd::load_bfloat(reinterpret_cast<const uint16_t*>(p));
}

// Unquantized weights: sums over even and odd columns, added at the end.
template <Format F, int kCount>
void float_rows(const Matrix& m, int tile, const LinearInput& in, int first,
                const LinearOutput& to) {
  constexpr int kStep = kTileRows * format_info(F).element_bytes;
  const uint8_t* data = m.data + tile * m.tile_bytes();
  const float* x = in.x + first * in.stride;
  Simd::F even[kCount], odd[kCount];
  for (int r = 0; r < kCount; ++r) even[r] = odd[r] = Simd::zero();
  int k = 0;
  for (; k + 1 < m.cols; k += 2, data += 2 * kStep) {
    prefetch_ahead(data, 2 * kStep);
    const Simd::F w0 = load_columns<F>(data), w1 = load_columns<F>(data + kStep);
    for (int r = 0; r < kCount; ++r) {
      even[r] = Simd::fma(w0, Simd::set1(x[r * in.stride + k]), even[r]);
      odd[r] = Simd::fma(w1, Simd::set1(x[r * in.stride + k + 1]), odd[r]);
    }
  }
  if (k < m.cols) {
    const Simd::F w0 = load_columns<F>(data);
    for (int r = 0; r < kCount; ++r) {
      even[r] = Simd::fma(w0, Simd::set1(x[r * in.stride + k]), even[r]);
    }
  }
  for (int r = 0; r < kCount; ++r) {
    finish_row(Simd::add(even[r], odd[r]), first + r, tile, m.rows, to);
  }
}

template <Format F, int kCount>
void some_rows(const Matrix& m, int tile, const LinearInput& in, int block, int first,
               const LinearOutput& to) {
  if constexpr (is_quantized(F)) {
    quantized_rows<F, kCount>(m, tile, in.quantized, block, first, to);
  } else {
    float_rows<F, kCount>(m, tile, in, block * kRowBlock + first, to);
  }
}

// Picks the kernel unrolled for exactly `count` rows.
template <Format F, int kCount>
void exact_rows(int count, const Matrix& m, int tile, const LinearInput& in, int block, int first,
                const LinearOutput& to) {
  if constexpr (kCount > 0) {
    if (count == kCount) return some_rows<F, kCount>(m, tile, in, block, first, to);
    exact_rows<F, kCount - 1>(count, m, tile, in, block, first, to);
  }
}

template <Format F>
void format_tiles(const Matrix& m, const LinearInput& in, int begin, int end,
                  const LinearOutput& to) {
  const int all_rows = is_quantized(F) ? in.quantized.rows : in.rows;
  for (int tile = begin; tile < end; ++tile) {
    for (int row = 0; row < all_rows; row += kRowBlock) {
      const int rows = all_rows - row < kRowBlock ? all_rows - row : kRowBlock;
      for (int first = 0; first < rows; first += Simd::kRows) {
        const int count = rows - first < Simd::kRows ? rows - first : Simd::kRows;
        exact_rows<F, Simd::kRows>(count, m, tile, in, row / kRowBlock, first, to);
      }
    }
  }
}

inline void linear_tiles(const Matrix& m, const LinearInput& in, int begin, int end,
                         const LinearOutput& to) {
  switch (m.format) {
    case Format::F32: return format_tiles<Format::F32>(m, in, begin, end, to);
    case Format::F16: return format_tiles<Format::F16>(m, in, begin, end, to);
    case Format::BF16: return format_tiles<Format::BF16>(m, in, begin, end, to);
    case Format::Q4Affine: return format_tiles<Format::Q4Affine>(m, in, begin, end, to);
    case Format::Q4Symmetric: return format_tiles<Format::Q4Symmetric>(m, in, begin, end, to);
    case Format::Q4Super: return format_tiles<Format::Q4Super>(m, in, begin, end, to);
    case Format::Q6Super: return format_tiles<Format::Q6Super>(m, in, begin, end, to);
    case Format::Q8Symmetric: return format_tiles<Format::Q8Symmetric>(m, in, begin, end, to);
    case Format::Q8Affine: return format_tiles<Format::Q8Affine>(m, in, begin, end, to);
    case Format::Q4Table: return format_tiles<Format::Q4Table>(m, in, begin, end, to);
    case Format::Q4TableSuper: return format_tiles<Format::Q4TableSuper>(m, in, begin, end, to);
  }
}

inline void linear_row_tile(const Matrix& m, const QuantizedRows& x, int row, int tile,
                            const LinearOutput& to) {
  const int block = row / kRowBlock, first = row % kRowBlock;
  switch (m.format) {
    case Format::Q4Affine:
      return quantized_rows<Format::Q4Affine, 1>(m, tile, x, block, first, to);
    case Format::Q4Symmetric:
      return quantized_rows<Format::Q4Symmetric, 1>(m, tile, x, block, first, to);
    case Format::Q4Super: return quantized_rows<Format::Q4Super, 1>(m, tile, x, block, first, to);
    case Format::Q6Super: return quantized_rows<Format::Q6Super, 1>(m, tile, x, block, first, to);
    case Format::Q8Symmetric:
      return quantized_rows<Format::Q8Symmetric, 1>(m, tile, x, block, first, to);
    case Format::Q8Affine: return quantized_rows<Format::Q8Affine, 1>(m, tile, x, block, first, to);
    case Format::Q4Table: return quantized_rows<Format::Q4Table, 1>(m, tile, x, block, first, to);
    case Format::Q4TableSuper:
      return quantized_rows<Format::Q4TableSuper, 1>(m, tile, x, block, first, to);
    default: return;
  }
}

}  // namespace
}  // namespace slipstream
