// Packed linear layers over the including variant's Simd.
//
// The integer dot product of a group is exact and the float fold of a row's groups is one fixed
// sequence of operations, so a row's result has the same bits whatever rows stand beside it.
#pragma once

#include "rows_impl.h"

namespace slipstream {
namespace {

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

constexpr int kUnpackedRowBlocks = 8;  // row blocks that share an unpacked tile

template <Format F>
void many_row_tiles(const Matrix& m, const QuantizedRows& x, int begin, int end,
                    const LinearOutput& to) {
  alignas(64) float totals[kUnpackedRowBlocks * kRowBlock * kTileRows];
  for (int tile = begin; tile < end; ++tile) {
    for (int first = 0; first < x.blocks(); first += kUnpackedRowBlocks) {
      const int last = first + kUnpackedRowBlocks < x.blocks() ? first + kUnpackedRowBlocks : x.blocks();
      many_rows<F>(m, tile, x, first, last, totals, to);
    }
  }
}

template <Format F>
void format_tiles(const Matrix& m, const LinearInput& in, int begin, int end,
                  const LinearOutput& to) {
  const int all_rows = is_quantized(F) ? in.quantized.rows : in.rows;
  if constexpr (kCanUnpack<F>) {
    if (all_rows >= kUnpackFrom<F>) return many_row_tiles<F>(m, in.quantized, begin, end, to);
  }
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
