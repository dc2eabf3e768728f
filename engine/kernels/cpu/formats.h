// Packed weight formats and their byte layout.
//
// A matrix [rows, cols] is cut into tiles of 16 output rows. A quantized tile is a run of blocks;
// a block is a header (scales, minima) and then its groups of 32 columns. Inside a group the 32
// columns are eight "quads" of 4; the vector of quad j holds byte row * 4 + i for column 4 j + i,
// which is what vpdpbusd, tdpbssd and sdot want. 4-bit formats keep quad 2 j in the low and quad
// 2 j + 1 in the high nibbles of vector j.
#pragma once

#include <cstddef>
#include <cstdint>

namespace slipstream {

constexpr int kTileRows = 16;
constexpr int kGroup = 32;
constexpr int kQuads = kGroup / 4;
constexpr int kVectorBytes = 64;

// The names that the Python module has for them are written to packed files: never reuse one.
enum class Format : uint8_t {
  F32 = 0,
  F16 = 1,
  BF16 = 2,
  Q4Affine = 3,     // w = d q + m, float16 d and m per group                        (Q4_1, int4)
  Q4Symmetric = 4,  // w = d (q - 8), float16 d per group                            (Q4_0)
  Q4Super = 5,      // w = (D s) q - (M m), 6-bit s and m per group, float16 D and M per 8 (Q4_K)
  Q6Super = 6,      // w = (D s) (q - 32), 8-bit s per 16 columns, float16 D per 8 groups  (Q6_K)
  Q8Symmetric = 7,  // w = d q, q signed, float16 d per group                  (Q8_0, Q5_0, int8)
  Q8Affine = 8,     // w = d q + m, 0 <= q < 32, float32 d and m per group           (Q5_1, Q5_K)
  Q4Table = 9,      // w = d t[q], float16 d per group                                  (IQ4_NL)
  Q4TableSuper = 10,  // w = (D s) t[q], signed 8-bit s per group, float16 D per 8      (IQ4_XS)
};

// t: the sixteen levels of the IQ4 types, closer to each other near zero.
constexpr int8_t kLevels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

constexpr bool is_quantized(Format f) { return f >= Format::Q4Affine; }

template <Format F>
struct Layout;  // kGroups a block, kHeader bytes a block, kBytes a group

template <>
struct Layout<Format::Q4Affine> {
  static constexpr int kGroups = 1, kHeader = 64, kBytes = 256;
};
template <>
struct Layout<Format::Q4Symmetric> {
  static constexpr int kGroups = 2, kHeader = 64, kBytes = 256;
};
template <>
struct Layout<Format::Q4Super> {
  // D[16] f16, M[16] f16, then for each group s[16] u8, m[16] u8
  static constexpr int kGroups = 8, kHeader = 64 + 8 * 32, kBytes = 256;
};
template <>
struct Layout<Format::Q6Super> {
  // D[16] f16, 32 bytes of padding, then for each group s[16] i8 of its low and of its high half.
  // A group is four vectors of nibbles and two vectors of 2-bit tops, four quads in each.
  static constexpr int kGroups = 8, kHeader = 64 + 8 * 32, kBytes = 256 + 128;
};
template <>
struct Layout<Format::Q8Symmetric> {
  static constexpr int kGroups = 2, kHeader = 64, kBytes = 512;
};
template <>
struct Layout<Format::Q8Affine> {
  static constexpr int kGroups = 1, kHeader = 128, kBytes = 512;
};
template <>
struct Layout<Format::Q4Table> : Layout<Format::Q4Symmetric> {};
template <>
struct Layout<Format::Q4TableSuper> {
  // D[16] f16, 32 bytes of padding, then for each group s[16] i8 and as much padding
  static constexpr int kGroups = 8, kHeader = 64 + 8 * 32, kBytes = 256;
};

struct FormatInfo {
  int groups_per_block;
  int header_bytes;
  int group_bytes;
  int element_bytes;  // of an unquantized format, else 0
};

template <Format F>
constexpr FormatInfo quantized_info() {
  return {Layout<F>::kGroups, Layout<F>::kHeader, Layout<F>::kBytes, 0};
}

constexpr FormatInfo format_info(Format f) {
  switch (f) {
    case Format::F32: return {0, 0, 0, 4};
    case Format::F16:
    case Format::BF16: return {0, 0, 0, 2};
    case Format::Q4Affine: return quantized_info<Format::Q4Affine>();
    case Format::Q4Symmetric: return quantized_info<Format::Q4Symmetric>();
    case Format::Q4Super: return quantized_info<Format::Q4Super>();
    case Format::Q6Super: return quantized_info<Format::Q6Super>();
    case Format::Q8Symmetric: return quantized_info<Format::Q8Symmetric>();
    case Format::Q8Affine: return quantized_info<Format::Q8Affine>();
    case Format::Q4Table: return quantized_info<Format::Q4Table>();
    case Format::Q4TableSuper: return quantized_info<Format::Q4TableSuper>();
  }
  return {0, 0, 0, 0};
}

constexpr int block_bytes(Format f) {
  const FormatInfo info = format_info(f);
  return info.header_bytes + info.groups_per_block * info.group_bytes;
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// A packed matrix somewhere in memory, 64-byte aligned.
struct Matrix {
  Format format = Format::F32;
  int rows = 0;
  int cols = 0;
  const uint8_t* data = nullptr;

  int tiles() const { return static_cast<int>(ceil_div(rows, kTileRows)); }
  // Groups of a quantized tile, whole blocks, those past `cols` having scale 0.
  int groups() const {
    return static_cast<int>(round_up(ceil_div(cols, kGroup), format_info(format).groups_per_block));
  }
  size_t tile_bytes() const {
    const FormatInfo info = format_info(format);
    if (info.element_bytes > 0) {
      return static_cast<size_t>(round_up(int64_t{cols} * kTileRows * info.element_bytes, 64));
    }
    const size_t blocks = static_cast<size_t>(groups() / info.groups_per_block);
    return blocks * static_cast<size_t>(block_bytes(format));
  }
  size_t bytes() const { return static_cast<size_t>(tiles()) * tile_bytes(); }
};

}  // namespace slipstream
