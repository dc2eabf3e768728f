// AVX512-VNNI plus AMX: many rows of a quantized matrix go through 16 x 16 integer tiles. The
// float fold is operation for operation that of fold_group, so a row's bits are the same here.
#include "simd_avx512.h"

#include "table_impl.h"

namespace slipstream {
namespace {

constexpr int kChunkGroups = 8;     // groups unpacked at a time, whole blocks of every format
constexpr int kChunkRowBlocks = 8;  // row blocks that share an unpacked chunk

// The compilers' own tile intrinsics want literal register numbers; these take template arguments.
template <int kTile>
SLIPSTREAM_INLINE void tile_load(const void* p, int64_t stride) {
  __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(p), "r"(stride) : "memory");
}
template <int kTile>
SLIPSTREAM_INLINE void tile_store(void* p, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(kTile), "r"(p), "r"(stride) : "memory");
}
template <int kTile>
SLIPSTREAM_INLINE void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <int kC, int kA, int kB>
SLIPSTREAM_INLINE void tile_dot() {
  __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

constexpr int kC0 = 0, kC1 = 1, kC2 = 2, kC3 = 3, kA0 = 4, kA1 = 5, kB0 = 6, kB1 = 7;

template <Format F>
constexpr bool kHalves = F == Format::Q6Super;  // two dot products of 16 columns a group

// Below these rows vpdpbusd costs less than filling and emptying tiles (measured).
template <Format F>
constexpr int kMinRows = kHalves<F> ? 9 : 5;

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  TileConfig(int m, int k) {
    for (int t = kC0; t <= kC3; ++t) set(t, m, kVectorBytes);
    for (int t = kA0; t <= kA1; ++t) set(t, m, k);
    for (int t = kB0; t <= kB1; ++t) set(t, k / 4, kVectorBytes);
  }
  void set(int tile, int tile_rows, int bytes) {
    rows[tile] = static_cast<uint8_t>(tile_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};

struct Chunk {
  alignas(64) int8_t unpacked[kChunkGroups][kGroup * kTileRows];
  alignas(64) float first[kChunkGroups][kTileRows];
  alignas(64) float second[kChunkGroups][kTileRows];
  const int8_t* weights[kChunkGroups];
};

template <Format F>
void unpack_chunk(const uint8_t* data, int groups, Chunk& chunk) {
  using L = Layout<F>;
  for (int g = 0; g < groups;) {
    const BlockScales<F> super(data);
    const uint8_t* group = data + L::kHeader;
    for (int i = 0; i < L::kGroups; ++i, ++g, group += L::kBytes) {
      const GroupScales s = group_scales<F>(data, i, super);
      Simd::store(chunk.first[g], s.first);
      if constexpr (kAffine<F> || kHalves<F>) Simd::store(chunk.second[g], s.second);
      if constexpr (F == Format::Q8Symmetric || F == Format::Q8Affine) {
        chunk.weights[g] = reinterpret_cast<const int8_t*>(group);
      } else {
        Simd::Q w[kQuads];
        unpack_group<F>(group, w);
        for (int j = 0; j < kQuads; ++j) {
          if constexpr (kOffset<F> != 0) w[j] = _mm512_sub_epi8(w[j], _mm512_set1_epi8(kOffset<F>));
          _mm512_store_si512(chunk.unpacked[g] + j * kVectorBytes, w[j]);
        }
        chunk.weights[g] = chunk.unpacked[g];
      }
    }
    data = group;
  }
}

// Starts the products of one group; odd and even groups use different tiles.
template <Format F, int kOdd>
SLIPSTREAM_INLINE void multiply(const int8_t* weights, const int8_t* q, int32_t* product) {
  if constexpr (kHalves<F>) {
    constexpr int kLow = kOdd ? kC2 : kC0, kHigh = kOdd ? kC3 : kC1;
    tile_load<kA0>(q, kGroup);
    tile_load<kB0>(weights, kVectorBytes);
    tile_load<kA1>(q + kGroup / 2, kGroup);
    tile_load<kB1>(weights + 4 * kVectorBytes, kVectorBytes);
    tile_zero<kLow>();
    tile_zero<kHigh>();
    tile_dot<kLow, kA0, kB0>();
    tile_dot<kHigh, kA1, kB1>();
    tile_store<kLow>(product, kVectorBytes);
    tile_store<kHigh>(product + kTileRows * kRowBlock, kVectorBytes);
  } else {
    constexpr int kC = kOdd ? kC1 : kC0, kA = kOdd ? kA1 : kA0, kB = kOdd ? kB1 : kB0;
    tile_load<kA>(q, kGroup);
    tile_load<kB>(weights, kVectorBytes);
    tile_zero<kC>();
    tile_dot<kC, kA, kB>();
    tile_store<kC>(product, kVectorBytes);
  }
}

template <Format F>
SLIPSTREAM_INLINE __m512 fold_product(__m512 total, const int32_t* product, __m512 first, __m512 second, float scale,
                    float scaled_sum) {
  const __m512 dot = _mm512_cvtepi32_ps(_mm512_load_si512(product));
  if constexpr (kHalves<F>) {
    const __m512 high =
        _mm512_cvtepi32_ps(_mm512_load_si512(product + kTileRows * kRowBlock));
    const __m512 scaled = Simd::fma(high, second, Simd::mul(dot, first));
    return Simd::fma(scaled, Simd::set1(scale), total);
  } else {
    total = Simd::fma(Simd::mul(dot, first), Simd::set1(scale), total);
    if constexpr (kAffine<F>) total = Simd::fma(second, Simd::set1(scaled_sum), total);
    return total;
  }
}

// kRows rows (a whole row block) against a chunk of groups; totals[row][16]. With every group it
// fetches ahead of a group's share of `data`, if any: all at once would exhaust the fill buffers.
template <Format F, int kRows>
void chunk_rows(const Chunk& chunk, int groups, const QuantizedRows& x, int block, int first_group,
                const uint8_t* data, float* totals) {
  constexpr int kShareBytes = block_bytes(F) / Layout<F>::kGroups;
  constexpr int kProduct = kTileRows * kRowBlock * (kHalves<F> ? 2 : 1);
  alignas(64) int32_t products[2][kProduct];
  const int64_t base = x.block_offset(block) + int64_t{first_group} * kRows;
  const int8_t* q = x.q + base * kGroup;
  const float* scale = x.scale + base;
  const float* scaled_sum = x.scaled_sum + base;
  __m512 total[kRows];
  for (int r = 0; r < kRows; ++r) total[r] = _mm512_load_ps(totals + r * kTileRows);
  multiply<F, 0>(chunk.weights[0], q, products[0]);
  for (int g = 0; g < groups; ++g) {
    if (data != nullptr) {
      prefetch_ahead(data, kShareBytes);
      data += kShareBytes;
    }
    if (g + 1 < groups) {
      const int8_t* next = q + (g + 1) * kRows * kGroup;
      if (g % 2 == 0) {
        multiply<F, 1>(chunk.weights[g + 1], next, products[1]);
      } else {
        multiply<F, 0>(chunk.weights[g + 1], next, products[0]);
      }
    }
    const __m512 first = _mm512_load_ps(chunk.first[g]);
    const __m512 second =
        kAffine<F> || kHalves<F> ? _mm512_load_ps(chunk.second[g]) : _mm512_setzero_ps();
    const int32_t* product = products[g % 2];
    for (int r = 0; r < kRows; ++r) {
      total[r] = fold_product<F>(total[r], product + r * kTileRows, first, second,
                                 scale[g * kRows + r], scaled_sum[g * kRows + r]);
    }
  }
  for (int r = 0; r < kRows; ++r) _mm512_store_ps(totals + r * kTileRows, total[r]);
}

template <Format F, int kRows>
void exact_chunk_rows(int rows, const Chunk& chunk, int groups, const QuantizedRows& x, int block,
                      int first_group, const uint8_t* data, float* totals) {
  if constexpr (kRows > 0) {
    if (rows == kRows) {
      return chunk_rows<F, kRows>(chunk, groups, x, block, first_group, data, totals);
    }
    exact_chunk_rows<F, kRows - 1>(rows, chunk, groups, x, block, first_group, data, totals);
  }
}

template <Format F>
void amx_tiles(const Matrix& m, const LinearInput& in, int begin, int end, const LinearOutput& to) {
  const QuantizedRows& x = in.quantized;
  if (x.rows < kMinRows<F>) return format_tiles<F>(m, in, begin, end, to);
  const int groups = m.groups();
  constexpr int kChunkBytes = kChunkGroups / Layout<F>::kGroups * block_bytes(F);
  Chunk chunk;
  alignas(64) float totals[kChunkRowBlocks][kRowBlock * kTileRows];
  int configured = 0;
  for (int tile = begin; tile < end; ++tile) {
    for (int first = 0; first < x.blocks(); first += kChunkRowBlocks) {
      const int last = first + kChunkRowBlocks < x.blocks() ? first + kChunkRowBlocks : x.blocks();
      __builtin_memset(totals, 0, sizeof(totals[0]) * static_cast<size_t>(last - first));
      const uint8_t* data = m.data + tile * m.tile_bytes();
      for (int g = 0; g < groups; g += kChunkGroups, data += kChunkBytes) {
        const int count = groups - g < kChunkGroups ? groups - g : kChunkGroups;
        unpack_chunk<F>(data, count, chunk);
        for (int block = first; block < last; ++block) {
          const int rows = x.block_rows(block);
          if (rows != configured) {
            const TileConfig config(rows, kHalves<F> ? kGroup / 2 : kGroup);
            __asm__ volatile("ldtilecfg %0" ::"m"(config));
            configured = rows;
          }
          exact_chunk_rows<F, kRowBlock>(rows, chunk, count, x, block, g,
                                         block == first ? data : nullptr, totals[block - first]);
        }
      }
      for (int block = first; block < last; ++block) {
        for (int r = 0; r < x.block_rows(block); ++r) {
          finish_row(_mm512_load_ps(totals[block - first] + r * kTileRows), block * kRowBlock + r,
                     tile, m.rows, to);
        }
      }
    }
  }
  __asm__ volatile("tilerelease");
}

void amx_linear_tiles(const Matrix& m, const LinearInput& in, int begin, int end,
                      const LinearOutput& to) {
  switch (m.format) {
    case Format::Q4Affine: return amx_tiles<Format::Q4Affine>(m, in, begin, end, to);
    case Format::Q4Symmetric: return amx_tiles<Format::Q4Symmetric>(m, in, begin, end, to);
    case Format::Q4Super: return amx_tiles<Format::Q4Super>(m, in, begin, end, to);
    case Format::Q6Super: return amx_tiles<Format::Q6Super>(m, in, begin, end, to);
    case Format::Q8Symmetric: return amx_tiles<Format::Q8Symmetric>(m, in, begin, end, to);
    case Format::Q8Affine: return amx_tiles<Format::Q8Affine>(m, in, begin, end, to);
    case Format::Q4Table: return amx_tiles<Format::Q4Table>(m, in, begin, end, to);
    case Format::Q4TableSuper: return amx_tiles<Format::Q4TableSuper>(m, in, begin, end, to);
    default: return linear_tiles(m, in, begin, end, to);
  }
}

constexpr Kernels make_amx_table() {
  Kernels table = make_table("amx");
  table.linear_tiles = amx_linear_tiles;
  return table;
}

}  // namespace

const Kernels* amx_kernels() {
  static constexpr Kernels kTable = make_amx_table();
  return &kTable;
}

}  // namespace slipstream
