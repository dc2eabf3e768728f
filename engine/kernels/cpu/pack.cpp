#include "pack.h"

#include <cstring>
#include <vector>

#include "gguf_blocks.h"
#include "half.h"
#include "rounding.h"

namespace slipstream {
namespace {

void put_u16(uint8_t* p, int index, uint16_t v) { std::memcpy(p + 2 * index, &v, 2); }
void put_f32(uint8_t* p, int index, float v) { std::memcpy(p + 4 * index, &v, 4); }

void write_header(Format format, uint8_t* block, int group, int row, const DecodedGroup& g) {
  uint8_t* small = block + 64 + group * 32;
  switch (format) {
    case Format::Q4Affine:
      put_u16(block, row, g.d);
      put_u16(block, 16 + row, g.m);
      break;
    case Format::Q4Symmetric:
    case Format::Q4Table:
    case Format::Q8Symmetric: put_u16(block, 16 * group + row, g.d); break;
    case Format::Q4Super:
      put_u16(block, row, g.d);
      put_u16(block, 16 + row, g.m);
      small[row] = g.small_scale;
      small[16 + row] = g.small_minimum;
      break;
    case Format::Q6Super:
      put_u16(block, row, g.d);
      small[row] = static_cast<uint8_t>(g.half_scales[0]);
      small[16 + row] = static_cast<uint8_t>(g.half_scales[1]);
      break;
    case Format::Q4TableSuper:
      put_u16(block, row, g.d);
      small[row] = g.small_scale;
      break;
    case Format::Q8Affine:
      put_f32(block, row, g.scale);
      put_f32(block, 16 + row, g.minimum);
      break;
    default: break;
  }
}

void write_quants(Format format, uint8_t* group, int row, const uint8_t q[kGroup]) {
  for (int quad = 0; quad < kQuads; ++quad) {
    if (format == Format::Q8Symmetric || format == Format::Q8Affine) {
      std::memcpy(group + quad * kVectorBytes + row * 4, q + quad * 4, 4);
      continue;
    }
    uint8_t* nibbles = group + quad / 2 * kVectorBytes + row * 4;
    for (int i = 0; i < 4; ++i) {
      const int low = q[quad * 4 + i] & 15;
      nibbles[i] = static_cast<uint8_t>(nibbles[i] | (quad % 2 == 0 ? low : low << 4));
    }
    if (format != Format::Q6Super) continue;
    uint8_t* tops = group + (4 + quad / 4) * kVectorBytes + row * 4;
    for (int i = 0; i < 4; ++i) {
      tops[i] = static_cast<uint8_t>(tops[i] | (q[quad * 4 + i] >> 4) << (2 * (quad % 4)));
    }
  }
}

void write_group(const Matrix& m, uint8_t* tile, int64_t group, int row, const DecodedGroup& g) {
  const FormatInfo info = format_info(m.format);
  const int64_t block_bytes = info.header_bytes + int64_t{info.groups_per_block} * info.group_bytes;
  const int in_block = static_cast<int>(group % info.groups_per_block);
  uint8_t* block = tile + group / info.groups_per_block * block_bytes;
  write_header(m.format, block, in_block, row, g);
  write_quants(m.format, block + info.header_bytes + in_block * info.group_bytes, row, g.q);
}

// The file's row that belongs at `row`: interleaved pairs back into halves of a head.
int64_t source_row(int64_t row, int64_t rows, int heads) {
  if (heads == 0) return row;
  const int64_t head_dim = rows / heads, half = head_dim / 2;
  const int64_t head = row / head_dim, i = row % head_dim;
  return head * head_dim + i % half * 2 + i / half;
}

void pack_element_row(const uint8_t* row, const Matrix& m, uint8_t* tile, int lane) {
  const int bytes = format_info(m.format).element_bytes;
  for (int64_t k = 0; k < m.cols; ++k) {
    std::memcpy(tile + (k * kTileRows + lane) * bytes, row + k * bytes, static_cast<size_t>(bytes));
  }
}

// The source may be unaligned: a tensor begins at any byte of its file.
float load_element(Format format, const uint8_t* source, int64_t index) {
  switch (format) {
    case Format::F32: return bits_float(read_u32(source + 4 * index));
    case Format::F16: return half_to_float(read_u16(source + 2 * index));
    case Format::BF16: return bfloat_to_float(read_u16(source + 2 * index));
    default: return 0.0f;
  }
}

float dequantized(Format format, const uint8_t* block, int group, int row, int column, int q) {
  const uint8_t* small = block + 64 + group * 32;
  const uint16_t* half = reinterpret_cast<const uint16_t*>(block);
  const float* single = reinterpret_cast<const float*>(block);
  const float x = static_cast<float>(q);
  switch (format) {
    case Format::Q4Affine: return half_to_float(half[row]) * x + half_to_float(half[16 + row]);
    case Format::Q4Symmetric: return half_to_float(half[16 * group + row]) * (x - 8.0f);
    case Format::Q8Symmetric:
      return half_to_float(half[16 * group + row]) * static_cast<float>(static_cast<int8_t>(q));
    case Format::Q4Super:
      return half_to_float(half[row]) * small[row] * x -
             half_to_float(half[16 + row]) * small[16 + row];
    case Format::Q6Super: {
      const int8_t scale = static_cast<int8_t>(small[column < 16 ? row : 16 + row]);
      return half_to_float(half[row]) * scale * (x - 32.0f);
    }
    case Format::Q8Affine: return single[row] * x + single[16 + row];
    case Format::Q4Table: return half_to_float(half[16 * group + row]) * kLevels[q];
    case Format::Q4TableSuper:
      return half_to_float(half[row]) * static_cast<int8_t>(small[row]) * kLevels[q];
    default: return 0.0f;
  }
}

int read_quant(Format format, const uint8_t* group, int row, int column) {
  const int quad = column / 4, at = row * 4 + column % 4;
  if (format == Format::Q8Symmetric || format == Format::Q8Affine) {
    return group[quad * kVectorBytes + at];
  }
  const int pair = group[quad / 2 * kVectorBytes + at];
  const int nibble = quad % 2 == 0 ? pair & 15 : pair >> 4;
  if (format != Format::Q6Super) return nibble;
  return nibble | (group[(4 + quad / 4) * kVectorBytes + at] >> (2 * (quad % 4)) & 3) << 4;
}

void pack_gguf_tile(const GgufSource& source, const Matrix& to, int t, uint8_t* tile) {
  const int64_t row_bytes = gguf_row_bytes(source.ggml_type, to.cols);
  std::memset(tile, 0, to.tile_bytes());
  for (int lane = 0; lane < kTileRows && t * kTileRows + lane < to.rows; ++lane) {
    const int64_t from = source_row(t * kTileRows + lane, to.rows, source.rotary_heads);
    const uint8_t* row = source.data + from * row_bytes;
    if (!is_quantized(to.format)) {
      pack_element_row(row, to, tile, lane);
      continue;
    }
    for (int64_t g = 0; g < to.cols / kGroup; ++g) {
      write_group(to, tile, g, lane, decode_group(source.ggml_type, row, g));
    }
  }
}

// Rounds a row to what `to` has; `value(column)` is its weight.
template <class Value>
void round_row(const Matrix& to, uint8_t* tile, int lane, Value value) {
  for (int64_t g = 0; g < ceil_div(to.cols, kGroup); ++g) {
    float x[kGroup] = {};
    for (int64_t i = 0; i < kGroup && g * kGroup + i < to.cols; ++i) x[i] = value(g * kGroup + i);
    write_group(to, tile, g, lane, round_group(to.format, x));
  }
}

void round_tile(const Matrix& exact, const uint8_t* from, const Matrix& to, uint8_t* tile) {
  Matrix one = exact;
  one.rows = kTileRows;
  one.data = from;
  std::vector<float> row(static_cast<size_t>(to.cols));
  std::memset(tile, 0, to.tile_bytes());
  for (int lane = 0; lane < kTileRows; ++lane) {
    dequantize_row(one, lane, row.data());
    round_row(to, tile, lane, [&](int64_t column) { return row[static_cast<size_t>(column)]; });
  }
}

}  // namespace

Format format_for_gguf(int ggml_type) {
  switch (ggml_type) {
    case kGgmlF32: return Format::F32;
    case kGgmlF16: return Format::F16;
    case kGgmlBF16: return Format::BF16;
    case kGgmlQ4_0: return Format::Q4Symmetric;
    case kGgmlQ4_1: return Format::Q4Affine;
    case kGgmlQ4_K: return Format::Q4Super;
    case kGgmlQ3_K:
    case kGgmlQ6_K: return Format::Q6Super;
    case kGgmlIQ4_NL: return Format::Q4Table;
    case kGgmlIQ4_XS: return Format::Q4TableSuper;
    case kGgmlQ5_0:
    case kGgmlQ8_0: return Format::Q8Symmetric;
    case kGgmlQ5_1:
    case kGgmlQ5_K: return Format::Q8Affine;
    default: block_shape(ggml_type); return Format::F32;
  }
}

int64_t gguf_row_bytes(int ggml_type, int64_t cols) {
  const BlockShape shape = block_shape(ggml_type);
  if (cols % shape.columns != 0) {
    throw std::invalid_argument("a GGUF row of " + std::to_string(cols) +
                                " columns is not whole blocks of " + std::to_string(shape.columns));
  }
  return cols / shape.columns * shape.bytes;
}

void pack_gguf_tiles(const GgufSource& source, const Matrix& to, uint8_t* out, int begin, int end) {
  Matrix exact = to;
  exact.format = format_for_gguf(source.ggml_type);
  std::vector<uint8_t> scratch(to.format == exact.format ? 0 : exact.tile_bytes());
  for (int t = begin; t < end; ++t) {
    uint8_t* tile = out + t * to.tile_bytes();
    if (scratch.empty()) {
      pack_gguf_tile(source, to, t, tile);
    } else {
      pack_gguf_tile(source, exact, t, scratch.data());
      round_tile(exact, scratch.data(), to, tile);
    }
  }
}

void pack_float_tiles(Format from, const uint8_t* source, const Matrix& to, uint8_t* out, int begin,
                      int end) {
  for (int t = begin; t < end; ++t) {
    uint8_t* tile = out + t * to.tile_bytes();
    std::memset(tile, 0, to.tile_bytes());
    for (int lane = 0; lane < kTileRows && t * kTileRows + lane < to.rows; ++lane) {
      const int64_t start = int64_t{t * kTileRows + lane} * to.cols;
      if (!is_quantized(to.format)) {
        const int bytes = format_info(to.format).element_bytes;
        pack_element_row(source + start * bytes, to, tile, lane);
        continue;
      }
      round_row(to, tile, lane,
                [&](int64_t column) { return load_element(from, source, start + column); });
    }
  }
}

void dequantize_row(const Matrix& m, int row, float* out) {
  const FormatInfo info = format_info(m.format);
  const uint8_t* tile = m.data + row / kTileRows * m.tile_bytes();
  const int lane = row % kTileRows;
  if (!is_quantized(m.format)) {
    for (int64_t k = 0; k < m.cols; ++k) out[k] = load_element(m.format, tile, k * kTileRows + lane);
    return;
  }
  const int64_t block_bytes = info.header_bytes + int64_t{info.groups_per_block} * info.group_bytes;
  for (int64_t k = 0; k < m.cols; ++k) {
    const int64_t g = k / kGroup;
    const int column = static_cast<int>(k % kGroup);
    const int in_block = static_cast<int>(g % info.groups_per_block);
    const uint8_t* block = tile + g / info.groups_per_block * block_bytes;
    const uint8_t* group = block + info.header_bytes + in_block * info.group_bytes;
    out[k] = dequantized(m.format, block, in_block, lane, column,
                         read_quant(m.format, group, lane, column));
  }
}

}  // namespace slipstream
