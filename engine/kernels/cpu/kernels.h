// What an instruction-set variant provides, as plain function pointers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats.h"

namespace slipstream {

// Kernels are built from small functions that must not become calls.
#define SLIPSTREAM_INLINE inline __attribute__((always_inline))
#define SLIPSTREAM_INLINE_LAMBDA __attribute__((always_inline))

constexpr int kRowBlock = 16;
constexpr int kSumKinds = 3;

// Rows quantized to signed 8 bits with a scale per group of 32 columns.
//
// Rows come in blocks of 16 (the last may have fewer: n). Inside a block everything is group-major:
// q[g][r][32], scale[g][r], scaled_sum[g][r] = scale * sum(q), and negated sums of q over
// the whole group and its halves, negated_sums[g][3][r], which undo the offset of unsigned weights.
//
// For layers that pass rounding errors on undamped (see Decoder), what rounding left of `precise`
// rows follows as as many more rows, quantized alike; their products add to those of the first.
struct QuantizedRows {
  int rows = 0;
  int groups = 0;
  int8_t* q = nullptr;
  float* scale = nullptr;
  float* scaled_sum = nullptr;
  int32_t* negated_sums = nullptr;

  int block_rows(int block) const {
    const int left = rows - block * kRowBlock;
    return left < kRowBlock ? left : kRowBlock;
  }
  int blocks() const { return (rows + kRowBlock - 1) / kRowBlock; }
  int64_t block_offset(int block) const { return int64_t{block} * kRowBlock * groups; }
};

struct LinearInput {
  QuantizedRows quantized;      // for quantized formats
  const float* x = nullptr;     // for unquantized formats: rows of floats, `stride` apart
  int64_t stride = 0;
  int rows = 0;                 // of floats, and of output
};

struct LinearOutput {
  float* out = nullptr;  // row r, column n at out[r * stride + n]
  int64_t stride = 0;
  int rows = 0;          // an input row beyond these is the remainder of row - rows
  const float* bias = nullptr;
  bool accumulate = false;
};

// Tiles a thread takes at least: shares small enough to even out cores of different speed.
inline int linear_grain(int tiles, int threads) {
  constexpr int kSharesPerThread = 16;
  const int grain = tiles / (threads * kSharesPerThread);
  return grain > 0 ? grain : 1;
}

enum class KvType : uint8_t { F32 = 0, BF16 = 1 };

// One layer's KV blocks: keys[block][head][dim][padded token], values[block][head][token][padded dim].
struct KvLayer {
  void* keys = nullptr;
  void* values = nullptr;
  KvType type = KvType::F32;
  int heads = 0;
  int head_dim = 0;
  int block_size = 0;
  int padded_block = 0;  // block_size rounded up to 16

  int value_stride() const { return static_cast<int>(round_up(head_dim, 16)); }
  int64_t key_offset(int64_t block, int head) const {
    return (block * heads + head) * head_dim * padded_block;
  }
  int64_t value_offset(int64_t block, int head) const {
    return (block * heads + head) * block_size * value_stride();
  }
};

constexpr int kMaxQueries = 8;

// Up to eight queries (rows x heads of one KV head's group) of one chunk.
struct AttentionTask {
  const KvLayer* kv = nullptr;
  const int32_t* block_table = nullptr;
  int kv_head = 0;
  int queries = 0;
  const float* q[kMaxQueries] = {};      // [head_dim]
  float* out[kMaxQueries] = {};          // [head_dim]
  int position[kMaxQueries] = {};        // attends to positions first .. position
  int window = 0;                        // 0: all, else the last `window` positions
  float scale = 1.0f;
  float* scores = nullptr;               // scratch, kMaxQueries * padded context floats
};

// One row's draw of a token, see engine/sampling/candidates.py.
struct DrawRow {
  const float* logits = nullptr;
  const int64_t* noise_ids = nullptr;
  uint64_t key = 0;
  float lowest = 0.0f;         // smallest logit that may win
  float score_to_beat = 0.0f;  // a logit with its noise
};

enum class Activation : uint8_t { Silu = 0, GeluTanh = 1 };

// A NaN or infinity that any of these meets comes out as a NaN of every value it has part in.
struct Kernels {
  const char* name;
  void (*linear_tiles)(const Matrix&, const LinearInput&, int begin, int end, const LinearOutput&);
  // One row against one tile of a quantized matrix, like linear_tiles.
  void (*linear_row_tile)(const Matrix&, const QuantizedRows&, int row, int tile,
                          const LinearOutput&);
  // Quantizes columns [32 begin, 32 end) of one row, and what rounding leaves of them as
  // `remainder_row` unless that is negative; columns past `cols` count as 0.
  void (*quantize_groups)(const float* x, int cols, int row, int remainder_row, int begin, int end,
                          QuantizedRows&);
  void (*rms_norm)(const float* x, const float* weight, int n, float eps, float* out);
  void (*rope)(float* x, const float* cos, const float* sin, int head_dim);
  void (*write_kv)(const KvLayer&, int64_t slot, int head, const float* key, const float* value);
  void (*attention)(const AttentionTask&);
  void (*gated)(const float* gate, const float* up, int n, Activation, float* out);
  void (*add)(const float* x, int n, float* into);
  // Writes the columns in [begin, end) that may win the draw, and returns how many.
  int (*likely_winners)(const DrawRow&, int begin, int end, int32_t* columns);
  // Sums 64-byte vectors, so that a benchmark can measure the read bandwidth.
  uint64_t (*read)(const uint8_t* data, size_t bytes);
};

const Kernels* scalar_kernels();
const Kernels* avx2_kernels();    // these return null where not built in
const Kernels* avx512_kernels();
const Kernels* amx_kernels();
const Kernels* neon_kernels();

// Variants this machine can run, fastest first; "scalar" is always the last.
std::vector<const Kernels*> runnable_kernels();

// What this build has kernels for, whether this machine can run them or not.
std::vector<const Kernels*> compiled_kernels();
// The named variant, or the fastest when `name` is empty. Throws std::invalid_argument.
const Kernels& select_kernels(const std::string& name);

}  // namespace slipstream
