// The forward pass of a Llama-shaped decoder over paged KV blocks.
#pragma once

#include <cstdint>
#include <vector>

#include "buffer.h"
#include "kernels.h"
#include "profile.h"
#include "step.h"
#include "thread_pool.h"

namespace slipstream {

struct Linear {
  Matrix weight;
  const float* bias = nullptr;
};

struct LayerWeights {
  Linear q, k, v, o, gate, up, down;
  const float* attention_norm = nullptr;
  const float* mlp_norm = nullptr;
  const float* q_norm = nullptr;               // [head_dim], optional
  const float* k_norm = nullptr;
  const float* post_attention_norm = nullptr;  // before the residual sum (Gemma), optional
  const float* post_mlp_norm = nullptr;
  int window = 0;      // 0: full attention
  int rope_table = 0;  // index into DecoderShape::inverse_frequencies
};

struct DecoderShape {
  int hidden = 0;
  int intermediate = 0;
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int vocab = 0;
  float norm_eps = 0.0f;
  float attention_scale = 0.0f;
  float embedding_scale = 1.0f;
  Activation activation = Activation::Silu;
  std::vector<std::vector<float>> inverse_frequencies;  // each [head_dim / 2]
};

class Decoder {
 public:
  Decoder(ThreadPool& pool, const Kernels& kernels, DecoderShape shape, KvShape kv, Matrix embedding,
          Linear head, const float* final_norm, std::vector<LayerWeights> layers);

  // Writes K and V of every token to its slot and float32 logits [step.logits, vocab].
  // Throws std::invalid_argument for an index out of range.
  void forward(const Step& step, float* logits);

  // Not while a forward pass runs, like forward() itself.
  Profile::Seconds take_profile(bool enabled) { return profile_.take(enabled); }

  static int64_t kv_block_bytes(const DecoderShape& shape, int layers, int block_size, KvType type);

 private:
  struct Rows {  // activations of the step, float and (when some consumer wants them) quantized
    Buffer values, q, scale, scaled_sum, sums;
    int cols = 0;
    int64_t stride = 0;
    QuantizedRows quantized;
    float* row(int64_t r) const { return values.as<float>() + r * stride; }
  };
  struct Output {
    const Linear* linear;
    float* out;
    int64_t stride;
    bool accumulate;
  };
  struct RowTile {
    int row, tile;
  };
  struct QueryBlock {  // of one KV head's group
    int chunk, kv_head, first, count;
  };

  void reserve(Rows& rows, int count, int cols, bool precise);
  void prepare(const Step& step);
  void rope_tables(const Step& step);
  void query_blocks(const Step& step);
  void embed(const Step& step);
  void layer(const Step& step, int index);
  void normalize(const float* x, int64_t stride, int count, const float* weight, Rows& to,
                 bool quantize, bool precise);
  void rotate_and_store(const Step& step, const LayerWeights& w, const KvLayer& kv);
  void attend(const Step& step, const LayerWeights& w, const KvLayer& kv);
  void quantize(Rows& rows, int count);
  void gate(const LayerWeights& w, int count);
  void add_residual(int count, const float* post_norm);
  void project_logits(const Step& step, float* logits);
  void refine(int count, float* logits);
  void find_likely_tiles(const float* largest, std::vector<int>& tiles) const;
  void project(const Rows& input, int count, std::initializer_list<Output> outputs);
  void project_head(int count, float* logits);
  static LinearInput linear_input(const Rows& rows, int count);
  KvLayer kv_layer(int index) const;

  ThreadPool& pool_;
  const Kernels& kernels_;
  const DecoderShape shape_;
  const KvShape kv_shape_;
  const Matrix embedding_;
  const Linear head_;
  const float* const final_norm_;
  const std::vector<LayerWeights> layers_;
  Buffer kv_memory_;
  int64_t layer_bytes_ = 0;
  int64_t keys_bytes_ = 0;

  // Queries, keys, values and logits feed softmaxes: there the 8-bit rounding of activations costs
  // most (measured on Qwen2.5 and SmolLM2: 60% of the KL divergence), so their inputs are precise:
  // those of logits, where the vocabulary makes that dear, only for the likelier tokens.
  Rows normed_, attended_, gated_, remainders_;
  Buffer hidden_, q_, k_, v_, gate_, up_, branch_, cos_, sin_, scores_,
      largest_logits_;  // of each row and tile
  std::vector<QueryBlock> query_blocks_;
  std::vector<std::vector<int>> likely_tiles_;  // of each row of logits
  std::vector<RowTile> refined_;
  int64_t scores_per_thread_ = 0;
  Profile profile_;
};

}  // namespace slipstream
