#include "decoder.h"

#include <algorithm>
#include <cmath>

#include "pack.h"
#include "require.h"

namespace slipstream {
namespace {

constexpr int kColumnsPerTask = 512;
// How far below the likeliest a token may be to count as likely: the widest of these that few
// tiles are within. (Text has a dozen tiles within 8 logits; noise has thousands.)
constexpr float kLikelyWithin[] = {8.0f, 4.0f, 2.0f, 1.0f};
constexpr size_t kFewTiles = 128;

// Bounds that keep sizes in bytes far from overflow.
constexpr int kMostLayers = 1 << 16;
constexpr int kMostBlockTokens = 1 << 16;
constexpr int64_t kMostKvBytes = int64_t{1} << 46;

int padded(int block_size) { return static_cast<int>(round_up(block_size, 16)); }

int64_t kv_bytes(KvType type) { return type == KvType::F32 ? 4 : 2; }

// -inf where there is none but NaN.
float largest_of(const float* x, int n) {
  float largest = -INFINITY;
  for (int i = 0; i < n; ++i) largest = x[i] > largest ? x[i] : largest;
  return largest;
}

bool any_quantized(std::initializer_list<const Linear*> linears) {
  return std::any_of(linears.begin(), linears.end(),
                     [](const Linear* l) { return is_quantized(l->weight.format); });
}

}  // namespace

Decoder::Decoder(ThreadPool& pool, const Kernels& kernels, DecoderShape shape, KvShape kv,
                 Matrix embedding, Linear head, const float* final_norm,
                 std::vector<LayerWeights> layers)
    : pool_(pool),
      kernels_(kernels),
      shape_(std::move(shape)),
      kv_shape_(kv),
      embedding_(embedding),
      head_(head),
      final_norm_(final_norm),
      layers_(std::move(layers)) {
  require(kv.num_blocks > 0, "the KV cache needs at least one block");
  require(kv.num_blocks <= kMostKvBytes / kv_block_bytes(shape_, static_cast<int>(layers_.size()),
                                                         kv.block_size, kv.type),
          "the KV cache is too large");
  keys_bytes_ = round_up(int64_t{kv.num_blocks} * shape_.kv_heads * shape_.head_dim *
                             padded(kv.block_size) * kv_bytes(kv.type), 64);
  const int64_t values = int64_t{kv.num_blocks} * shape_.kv_heads * kv.block_size *
                         round_up(shape_.head_dim, 16) * kv_bytes(kv.type);
  layer_bytes_ = keys_bytes_ + round_up(values, 64);
  kv_memory_ = Buffer(static_cast<size_t>(layer_bytes_) * layers_.size());
}

int64_t Decoder::kv_block_bytes(const DecoderShape& shape, int layers, int block_size,
                                KvType type) {
  require(layers > 0 && layers <= kMostLayers, "the number of layers is out of range");
  require(block_size > 0 && block_size <= kMostBlockTokens, "the KV block size is out of range");
  const int64_t keys = int64_t{shape.head_dim} * padded(block_size);
  const int64_t values = round_up(shape.head_dim, 16) * block_size;
  return layers * shape.kv_heads * (keys + values) * kv_bytes(type);
}

KvLayer Decoder::kv_layer(int index) const {
  uint8_t* base = kv_memory_.as<uint8_t>() + index * layer_bytes_;
  KvLayer kv;
  kv.keys = base;
  kv.values = base + keys_bytes_;
  kv.type = kv_shape_.type;
  kv.heads = shape_.kv_heads;
  kv.head_dim = shape_.head_dim;
  kv.block_size = kv_shape_.block_size;
  kv.padded_block = padded(kv_shape_.block_size);
  return kv;
}

void Decoder::reserve(Rows& rows, int count, int cols, bool precise) {
  rows.cols = cols;
  rows.stride = round_up(cols, 16);
  rows.values.ensure<float>(static_cast<size_t>(count * rows.stride));
  // Blocks of 8 groups are the widest a format pads to.
  rows.quantized.groups = static_cast<int>(round_up(ceil_div(cols, kGroup), 8));
  const size_t groups = static_cast<size_t>(precise ? 2 * count : count) * static_cast<size_t>(rows.quantized.groups);
  rows.quantized.q = rows.q.ensure<int8_t>(groups * kGroup);
  rows.quantized.scale = rows.scale.ensure<float>(groups);
  rows.quantized.scaled_sum = rows.scaled_sum.ensure<float>(groups);
  rows.quantized.negated_sums = rows.sums.ensure<int32_t>(groups * kSumKinds);
}

void Decoder::prepare(const Step& step) {
  const size_t t = static_cast<size_t>(step.tokens);
  const int q_width = shape_.heads * shape_.head_dim, kv_width = shape_.kv_heads * shape_.head_dim;
  reserve(normed_, step.tokens, shape_.hidden, true);
  reserve(attended_, step.tokens, q_width, false);
  reserve(gated_, step.tokens, shape_.intermediate, false);
  hidden_.ensure<float>(t * static_cast<size_t>(shape_.hidden));
  branch_.ensure<float>(t * static_cast<size_t>(shape_.hidden));
  q_.ensure<float>(t * static_cast<size_t>(q_width));
  k_.ensure<float>(t * static_cast<size_t>(kv_width));
  v_.ensure<float>(t * static_cast<size_t>(kv_width));
  gate_.ensure<float>(t * static_cast<size_t>(shape_.intermediate));
  up_.ensure<float>(t * static_cast<size_t>(shape_.intermediate));
  rope_tables(step);
  query_blocks(step);
}

void Decoder::rope_tables(const Step& step) {
  const int half = shape_.head_dim / 2;
  const size_t kinds = shape_.inverse_frequencies.size();
  const size_t count = kinds * static_cast<size_t>(step.tokens) * static_cast<size_t>(half);
  float* cos = cos_.ensure<float>(count);
  float* sin = sin_.ensure<float>(count);
  pool_.run(step.tokens * static_cast<int>(kinds), 16, [&](int begin, int end, int) {
    for (int i = begin; i < end; ++i) {
      const std::vector<float>& inverse =
          shape_.inverse_frequencies[static_cast<size_t>(i / step.tokens)];
      const float position = static_cast<float>(step.positions[i % step.tokens]);
      for (int d = 0; d < half; ++d) {
        const float angle = position * inverse[static_cast<size_t>(d)];
        cos[int64_t{i} * half + d] = std::cos(angle);
        sin[int64_t{i} * half + d] = std::sin(angle);
      }
    }
  });
}

void Decoder::query_blocks(const Step& step) {
  const int per_kv = shape_.heads / shape_.kv_heads;
  query_blocks_.clear();
  int64_t widest = 0;
  for (int c = 0; c < step.chunks; ++c) {
    const int queries = (step.query_starts[c + 1] - step.query_starts[c]) * per_kv;
    for (int h = 0; h < shape_.kv_heads; ++h) {
      for (int first = 0; first < queries; first += kMaxQueries) {
        query_blocks_.push_back({c, h, first, std::min(kMaxQueries, queries - first)});
      }
    }
    widest = std::max<int64_t>(widest, ceil_div(step.context_lens[c], kv_shape_.block_size));
  }
  scores_per_thread_ = kMaxQueries * widest * padded(kv_shape_.block_size);
  scores_.ensure<float>(static_cast<size_t>(scores_per_thread_ * pool_.threads()));
}

void Decoder::embed(const Step& step) {
  float* hidden = hidden_.as<float>();
  pool_.run(step.tokens, 4, [&](int begin, int end, int) {
    for (int t = begin; t < end; ++t) {
      float* row = hidden + int64_t{t} * shape_.hidden;
      dequantize_row(embedding_, step.token_ids[t], row);
      if (shape_.embedding_scale == 1.0f) continue;
      for (int i = 0; i < shape_.hidden; ++i) row[i] *= shape_.embedding_scale;
    }
  });
}

void Decoder::normalize(const float* x, int64_t stride, int count, const float* weight, Rows& to,
                        bool quantize, bool precise) {
  to.quantized.rows = precise ? 2 * count : count;
  pool_.run(count, std::max(4, count / (pool_.threads() * 2)), [&](int begin, int end, int) {
    for (int r = begin; r < end; ++r) {
      kernels_.rms_norm(x + r * stride, weight, to.cols, shape_.norm_eps, to.row(r));
      if (quantize) {
        kernels_.quantize_groups(to.row(r), to.cols, r, precise ? count + r : -1, 0,
                                 to.quantized.groups, to.quantized);
      }
    }
  });
}

LinearInput Decoder::linear_input(const Rows& rows, int count) {
  LinearInput in;
  in.quantized = rows.quantized;
  in.x = rows.values.as<float>();
  in.stride = rows.stride;
  in.rows = count;
  return in;
}

void Decoder::project(const Rows& input, int count, std::initializer_list<Output> outputs) {
  const LinearInput in = linear_input(input, count);
  int total = 0;
  for (const Output& o : outputs) total += o.linear->weight.tiles();
  pool_.run_in_order(total, linear_grain(total, pool_.threads()), [&](int begin, int end, int) {
    int base = 0;
    for (const Output& o : outputs) {
      const int tiles = o.linear->weight.tiles();
      const int from = std::max(begin - base, 0), to = std::min(end - base, tiles);
      if (from < to) {
        const LinearOutput out{o.out, o.stride, count, o.linear->bias, o.accumulate};
        kernels_.linear_tiles(o.linear->weight, in, from, to, out);
      }
      base += tiles;
    }
  });
}

// Logits, and the largest of each row and tile while they are in the cache.
void Decoder::project_head(int count, float* logits) {
  const LinearInput in = linear_input(normed_, count);
  const int tiles = head_.weight.tiles(), vocab = shape_.vocab;
  const LinearOutput out{logits, vocab, count, head_.bias, false};
  float* largest = largest_logits_.ensure<float>(static_cast<size_t>(count) * static_cast<size_t>(tiles));
  pool_.run_in_order(tiles, linear_grain(tiles, pool_.threads()), [&](int begin, int end, int) {
    kernels_.linear_tiles(head_.weight, in, begin, end, out);
    for (int r = 0; r < count; ++r) {
      for (int tile = begin; tile < end; ++tile) {
        const int at = tile * kTileRows;
        largest[int64_t{r} * tiles + tile] =
            largest_of(logits + int64_t{r} * vocab + at, std::min(kTileRows, vocab - at));
      }
    }
  });
}

void Decoder::rotate_and_store(const Step& step, const LayerWeights& w, const KvLayer& kv) {
  const int dim = shape_.head_dim, per_kv = shape_.heads / shape_.kv_heads;
  const int64_t table = int64_t{w.rope_table} * step.tokens * (dim / 2);
  pool_.run(step.tokens * shape_.kv_heads, 8, [&](int begin, int end, int) {
    for (int i = begin; i < end; ++i) {
      const int t = i / shape_.kv_heads, h = i % shape_.kv_heads;
      const float* cos = cos_.as<float>() + table + int64_t{t} * (dim / 2);
      const float* sin = sin_.as<float>() + table + int64_t{t} * (dim / 2);
      float* queries = q_.as<float>() + (int64_t{t} * shape_.heads + int64_t{h} * per_kv) * dim;
      for (int j = 0; j < per_kv; ++j) {
        float* q = queries + j * dim;
        if (w.q_norm != nullptr) kernels_.rms_norm(q, w.q_norm, dim, shape_.norm_eps, q);
        kernels_.rope(q, cos, sin, dim);
      }
      const int64_t at = (int64_t{t} * shape_.kv_heads + h) * dim;
      float* key = k_.as<float>() + at;
      if (w.k_norm != nullptr) kernels_.rms_norm(key, w.k_norm, dim, shape_.norm_eps, key);
      kernels_.rope(key, cos, sin, dim);
      kernels_.write_kv(kv, step.slots[t], h, key, v_.as<float>() + at);
    }
  });
}

void Decoder::attend(const Step& step, const LayerWeights& w, const KvLayer& kv) {
  const int dim = shape_.head_dim, per_kv = shape_.heads / shape_.kv_heads;
  pool_.run(static_cast<int>(query_blocks_.size()), 1, [&](int begin, int end, int thread) {
    for (int b = begin; b < end; ++b) {
      const QueryBlock& block = query_blocks_[static_cast<size_t>(b)];
      AttentionTask task;
      task.kv = &kv;
      task.block_table = step.block_tables + int64_t{block.chunk} * step.table_width;
      task.kv_head = block.kv_head;
      task.queries = block.count;
      task.window = w.window;
      task.scale = shape_.attention_scale;
      task.scores = scores_.as<float>() + thread * scores_per_thread_;
      for (int i = 0; i < block.count; ++i) {
        const int query = block.first + i;
        const int t = step.query_starts[block.chunk] + query / per_kv;
        const int head = block.kv_head * per_kv + query % per_kv;
        task.position[i] = step.positions[t];
        task.q[i] = q_.as<float>() + (int64_t{t} * shape_.heads + head) * dim;
        task.out[i] = attended_.row(t) + int64_t{head} * dim;
      }
      kernels_.attention(task);
    }
  });
}

void Decoder::quantize(Rows& rows, int count) {
  rows.quantized.rows = count;
  const int per_task = kColumnsPerTask / kGroup;
  const int tasks = static_cast<int>(ceil_div(rows.quantized.groups, per_task));
  pool_.run(count * tasks, 8, [&](int begin, int end, int) {
    for (int i = begin; i < end; ++i) {
      const int r = i / tasks, first = i % tasks * per_task;
      const int last = std::min(first + per_task, rows.quantized.groups);
      kernels_.quantize_groups(rows.row(r), rows.cols, r, -1, first, last, rows.quantized);
    }
  });
}

// gated = activation(gate) * up, each thread's columns from their projection to their rounding.
void Decoder::gate(const LayerWeights& w, int count) {
  const LinearInput in = linear_input(normed_, count);
  const bool quantize = is_quantized(w.down.weight.format);
  const int width = shape_.intermediate, tiles = w.gate.weight.tiles();
  const int groups =
      quantize ? gated_.quantized.groups : static_cast<int>(ceil_div(width, kGroup));
  constexpr int kTilesOfGroup = kGroup / kTileRows;
  float *gate = gate_.as<float>(), *up = up_.as<float>();
  gated_.quantized.rows = count;
  pool_.run_in_order(groups, linear_grain(groups, pool_.threads()), [&](int begin, int end, int) {
    const int from = std::min(begin * kTilesOfGroup, tiles), to = std::min(end * kTilesOfGroup, tiles);
    kernels_.linear_tiles(w.gate.weight, in, from, to, {gate, width, count, w.gate.bias, false});
    kernels_.linear_tiles(w.up.weight, in, from, to, {up, width, count, w.up.bias, false});
    const int first = begin * kGroup, n = std::min(end * kGroup, width) - first;
    for (int r = 0; r < count; ++r) {
      const int64_t at = int64_t{r} * width + first;
      if (n > 0) kernels_.gated(gate + at, up + at, n, shape_.activation, gated_.row(r) + first);
      if (!quantize) continue;
      kernels_.quantize_groups(gated_.row(r), width, r, -1, begin, end, gated_.quantized);
    }
  });
}

// hidden += norm(branch), for the architectures that normalize a branch before adding it.
void Decoder::add_residual(int count, const float* post_norm) {
  pool_.run(count, 4, [&](int begin, int end, int) {
    for (int r = begin; r < end; ++r) {
      float* branch = branch_.as<float>() + int64_t{r} * shape_.hidden;
      kernels_.rms_norm(branch, post_norm, shape_.hidden, shape_.norm_eps, branch);
      kernels_.add(branch, shape_.hidden, hidden_.as<float>() + int64_t{r} * shape_.hidden);
    }
  });
}

void Decoder::layer(const Step& step, int index) {
  const LayerWeights& w = layers_[static_cast<size_t>(index)];
  const KvLayer kv = kv_layer(index);
  const int n = step.tokens, hidden = shape_.hidden;
  const int q_width = shape_.heads * shape_.head_dim, kv_width = shape_.kv_heads * shape_.head_dim;

  profile_.enter(Part::Norm);
  normalize(hidden_.as<float>(), hidden, n, w.attention_norm, normed_,
            any_quantized({&w.q, &w.k, &w.v}), true);
  profile_.enter(Part::QueryKeyValue);
  project(normed_, n, {{&w.q, q_.as<float>(), q_width, false},
                       {&w.k, k_.as<float>(), kv_width, false},
                       {&w.v, v_.as<float>(), kv_width, false}});
  profile_.enter(Part::Rotate);
  rotate_and_store(step, w, kv);
  profile_.enter(Part::Attention);
  attend(step, w, kv);
  profile_.enter(Part::AttentionOutput);
  if (any_quantized({&w.o})) quantize(attended_, n);
  const bool norm_attention = w.post_attention_norm != nullptr;
  project(attended_, n,
          {{&w.o, (norm_attention ? branch_ : hidden_).as<float>(), hidden, !norm_attention}});
  if (norm_attention) add_residual(n, w.post_attention_norm);

  profile_.enter(Part::Norm);
  normalize(hidden_.as<float>(), hidden, n, w.mlp_norm, normed_, any_quantized({&w.gate, &w.up}),
            false);
  profile_.enter(Part::GateUp);
  gate(w, n);
  profile_.enter(Part::Down);
  const bool norm_mlp = w.post_mlp_norm != nullptr;
  project(gated_, n, {{&w.down, (norm_mlp ? branch_ : hidden_).as<float>(), hidden, !norm_mlp}});
  if (norm_mlp) add_residual(n, w.post_mlp_norm);
}

// Adds to the likelier tokens' logits what rounding has left of their inputs.
void Decoder::refine(int count, float* logits) {
  reserve(remainders_, count, shape_.hidden, false);
  QuantizedRows& remainders = remainders_.quantized;
  remainders.rows = count;
  likely_tiles_.resize(std::max(likely_tiles_.size(), static_cast<size_t>(count)));
  pool_.run(count, 1, [&](int begin, int end, int) {
    for (int r = begin; r < end; ++r) {
      // The row's remainder takes the place of the row itself.
      kernels_.quantize_groups(normed_.row(r), shape_.hidden, r, r, 0, remainders.groups,
                               remainders);
      find_likely_tiles(largest_logits_.as<float>() + int64_t{r} * head_.weight.tiles(),
                        likely_tiles_[static_cast<size_t>(r)]);
    }
  });
  refined_.clear();
  for (int r = 0; r < count; ++r) {
    for (const int tile : likely_tiles_[static_cast<size_t>(r)]) refined_.push_back({r, tile});
  }
  const LinearOutput to{logits, shape_.vocab, 0, nullptr, true};
  pool_.run(static_cast<int>(refined_.size()), 8, [&](int begin, int end, int) {
    for (int i = begin; i < end; ++i) {
      const RowTile& at = refined_[static_cast<size_t>(i)];
      kernels_.linear_row_tile(head_.weight, remainders, at.row, at.tile, to);
    }
  });
}

// From the largest logit of each tile.
void Decoder::find_likely_tiles(const float* largest, std::vector<int>& tiles) const {
  const int count = head_.weight.tiles();
  const float best = largest_of(largest, count);
  for (const float within : kLikelyWithin) {
    tiles.clear();
    for (int tile = 0; tile < count; ++tile) {
      if (largest[tile] >= best - within) tiles.push_back(tile);
    }
    if (tiles.size() <= kFewTiles) return;
  }
}

void Decoder::forward(const Step& step, float* logits) {
  check_step(step, shape_.vocab, kv_shape_);
  const ThreadPool::Region region(pool_);
  profile_.begin();
  prepare(step);
  embed(step);
  for (int i = 0; i < static_cast<int>(layers_.size()); ++i) layer(step, i);
  if (step.logits > 0) project_logits(step, logits);
  profile_.enter(Part::Prepare);
}

void Decoder::project_logits(const Step& step, float* logits) {
  profile_.enter(Part::Norm);
  float* wanted = branch_.as<float>();
  for (int l = 0; l < step.logits; ++l) {
    const float* row = hidden_.as<float>() + int64_t{step.logit_rows[l]} * shape_.hidden;
    std::copy_n(row, shape_.hidden, wanted + int64_t{l} * shape_.hidden);
  }
  const bool quantized = any_quantized({&head_});
  normalize(wanted, shape_.hidden, step.logits, final_norm_, normed_, quantized, false);
  profile_.enter(Part::Head);
  project_head(step.logits, logits);
  profile_.enter(Part::Refine);
  if (quantized) refine(step.logits, logits);
}

}  // namespace slipstream
