// Packing: GGUF blocks or plain floats into the tile layout of formats.h.
#pragma once

#include <cstdint>

#include "formats.h"

namespace slipstream {

// The packed format that holds a GGUF tensor type exactly. Throws std::invalid_argument.
Format format_for_gguf(int ggml_type);

// Bytes of one row of a GGUF tensor type. Throws std::invalid_argument when `cols` does not fit.
int64_t gguf_row_bytes(int ggml_type, int64_t cols);

// Packs tiles [begin, end), exactly when `to` has the format for the type, else rounded (see
// can_round_to). `rotary_heads` > 0: the file stores each head's rows interleaved for
// RoPE (llama.cpp's order for Llama) and they are put back into halves.
struct GgufSource {
  int ggml_type = 0;
  const uint8_t* data = nullptr;
  int rotary_heads = 0;
};
void pack_gguf_tiles(const GgufSource& source, const Matrix& to, uint8_t* out, int begin, int end);

// Packs tiles [begin, end) of floats (`from`: F32, F16 or BF16) at any alignment, rounded (see
// can_round_to), or as they are when `to` has their format.
void pack_float_tiles(Format from, const uint8_t* source, const Matrix& to, uint8_t* out, int begin,
                      int end);

// Expands row `row` of a packed matrix.
void dequantize_row(const Matrix& m, int row, float* out);

}  // namespace slipstream
