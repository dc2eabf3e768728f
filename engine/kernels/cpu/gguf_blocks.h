// GGUF block formats, decoded one group of 32 columns at a time.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "decoded_group.h"
#include "half.h"

namespace slipstream {
namespace {

enum GgmlType : int {
  kGgmlF32 = 0, kGgmlF16 = 1, kGgmlQ4_0 = 2, kGgmlQ4_1 = 3, kGgmlQ5_0 = 6, kGgmlQ5_1 = 7,
  kGgmlQ8_0 = 8, kGgmlQ3_K = 11, kGgmlQ4_K = 12, kGgmlQ5_K = 13, kGgmlQ6_K = 14, kGgmlIQ4_NL = 20,
  kGgmlIQ4_XS = 23, kGgmlBF16 = 30,
};

struct BlockShape {
  int columns, bytes;
};

inline BlockShape block_shape(int type) {
  switch (type) {
    case kGgmlF32: return {1, 4};
    case kGgmlF16:
    case kGgmlBF16: return {1, 2};
    case kGgmlQ4_0:
    case kGgmlIQ4_NL: return {32, 18};
    case kGgmlQ4_1: return {32, 20};
    case kGgmlQ5_0: return {32, 22};
    case kGgmlQ5_1: return {32, 24};
    case kGgmlQ8_0: return {32, 34};
    case kGgmlQ3_K: return {256, 110};
    case kGgmlQ4_K: return {256, 144};
    case kGgmlQ5_K: return {256, 176};
    case kGgmlQ6_K: return {256, 210};
    case kGgmlIQ4_XS: return {256, 136};
    default: throw std::invalid_argument("no packed format holds GGUF tensor type " +
                                         std::to_string(type));
  }
}

inline uint16_t read_u16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

inline uint32_t read_u32(const uint8_t* p) {
  uint32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

inline void decode_nibbles(const uint8_t* p, uint8_t* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = p[i] & 15;
    q[i + 16] = p[i] >> 4;
  }
}

inline void add_fifth_bits(const uint8_t* p, uint8_t* q) {
  const uint32_t bits = read_u32(p);
  for (int i = 0; i < 32; ++i) q[i] = static_cast<uint8_t>(q[i] | ((bits >> i & 1) << 4));
}

// 6-bit scale and minimum `j` of a Q4_K or Q5_K block's twelve bytes.
inline void small_scales(const uint8_t* p, int j, DecodedGroup& g) {
  if (j < 4) {
    g.small_scale = p[j] & 63;
    g.small_minimum = p[j + 4] & 63;
  } else {
    g.small_scale = static_cast<uint8_t>((p[j + 4] & 15) | (p[j - 4] >> 6 << 4));
    g.small_minimum = static_cast<uint8_t>((p[j + 4] >> 4) | (p[j] >> 6 << 4));
  }
}

inline void decode_k_nibbles(const uint8_t* p, int group, uint8_t* q) {
  const uint8_t* pair = p + 32 * (group / 2);
  for (int i = 0; i < 32; ++i) q[i] = group % 2 == 0 ? pair[i] & 15 : pair[i] >> 4;
}

inline void decode_q6_k(const uint8_t* block, int group, DecodedGroup& g) {
  const int half = group / 4, part = group % 4;
  const uint8_t* low = block + 64 * half + 32 * (part % 2);
  const uint8_t* tops = block + 128 + 32 * half;
  for (int i = 0; i < 32; ++i) {
    const int nibble = part < 2 ? low[i] & 15 : low[i] >> 4;
    g.q[i] = static_cast<uint8_t>(nibble | ((tops[i] >> (2 * part) & 3) << 4));
  }
  std::memcpy(g.half_scales, block + 192 + 2 * group, 2);
  g.d = read_u16(block + 208);
}

// Quants around 4 become quants around 32: with signed scales of half a group, Q6_K holds Q3_K too.
inline void decode_q3_k(const uint8_t* block, int group, DecodedGroup& g) {
  const int half = group / 4, part = group % 4;
  const uint8_t* low = block + 32 + 32 * half;
  for (int i = 0; i < 32; ++i) {
    const int q = (low[i] >> (2 * part) & 3) | ((block[i] >> group & 1) << 2);
    g.q[i] = static_cast<uint8_t>(q - 4 + 32);
  }
  for (int i = 0; i < 2; ++i) {
    const int j = 2 * group + i;
    const uint8_t* scales = block + 96;
    const int four = j < 8 ? scales[j] & 15 : scales[j - 8] >> 4;
    const int two = scales[8 + j % 4] >> (2 * (j / 4)) & 3;
    g.half_scales[i] = static_cast<int8_t>((four | two << 4) - 32);
  }
  g.d = read_u16(block + 108);
}

inline void decode_iq4_xs(const uint8_t* block, int group, DecodedGroup& g) {
  const int four = block[4 + group / 2] >> (4 * (group % 2)) & 15;
  const int two = read_u16(block + 2) >> (2 * group) & 3;
  g.small_scale = static_cast<uint8_t>((four | two << 4) - 32);  // a signed byte
  decode_nibbles(block + 8 + 16 * group, g.q);
}

// Group `group` of a row that starts at `row`.
inline DecodedGroup decode_group(int type, const uint8_t* row, int64_t group) {
  const BlockShape shape = block_shape(type);
  const int in_block = static_cast<int>(group % (shape.columns / 32));
  const uint8_t* p = row + group / (shape.columns / 32) * shape.bytes;
  DecodedGroup g;
  g.d = read_u16(p);
  switch (type) {
    case kGgmlQ4_0:
    case kGgmlIQ4_NL: decode_nibbles(p + 2, g.q); break;
    case kGgmlQ4_1:
      g.m = read_u16(p + 2);
      decode_nibbles(p + 4, g.q);
      break;
    case kGgmlQ5_0:  // q - 16 as a signed byte
      decode_nibbles(p + 6, g.q);
      add_fifth_bits(p + 2, g.q);
      for (uint8_t& q : g.q) q = static_cast<uint8_t>(q - 16);
      break;
    case kGgmlQ5_1:
      g.scale = half_to_float(g.d);
      g.minimum = half_to_float(read_u16(p + 2));
      decode_nibbles(p + 8, g.q);
      add_fifth_bits(p + 4, g.q);
      break;
    case kGgmlQ8_0: std::memcpy(g.q, p + 2, 32); break;
    case kGgmlQ4_K:
      g.m = read_u16(p + 2);
      small_scales(p + 4, in_block, g);
      decode_k_nibbles(p + 16, in_block, g.q);
      break;
    case kGgmlQ5_K:
      small_scales(p + 4, in_block, g);
      g.scale = half_to_float(g.d) * g.small_scale;
      g.minimum = -(half_to_float(read_u16(p + 2)) * g.small_minimum);
      decode_k_nibbles(p + 48, in_block, g.q);
      for (int i = 0; i < 32; ++i) {
        g.q[i] = static_cast<uint8_t>(g.q[i] | ((p[16 + i] >> in_block & 1) << 4));
      }
      break;
    case kGgmlQ3_K: decode_q3_k(p, in_block, g); break;
    case kGgmlQ6_K: decode_q6_k(p, in_block, g); break;
    case kGgmlIQ4_XS: decode_iq4_xs(p, in_block, g); break;
    default: throw std::invalid_argument("not a quantized GGUF tensor type");
  }
  return g;
}

}  // namespace
}  // namespace slipstream
