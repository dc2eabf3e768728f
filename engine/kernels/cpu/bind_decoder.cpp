// The decoder's Python class.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "decoder.h"

namespace slipstream {
namespace {

// A decoder and every Python buffer its weights lie in.
class BoundDecoder {
 public:
  static constexpr int64_t kMostWidth = 1 << 24;

  BoundDecoder(ThreadPool& pool, const std::string& variant, const nb::dict& shape,
               const nb::dict& weights, const nb::list& layers, int block_size, int num_blocks,
               KvType kv_type) {
    const DecoderShape s = read_shape(shape);
    std::vector<LayerWeights> native;
    for (nb::handle layer : layers) native.push_back(read_layer(s, nb::cast<nb::dict>(layer)));
    const Matrix embedding = matrix(weights, "embedding", s.vocab, s.hidden);
    const Linear head = linear_of(weights, "head", s.vocab, s.hidden);
    const float* norm = vector(weights, "final_norm", s.hidden, true);
    vocab_ = s.vocab;
    const KvShape kv{block_size, num_blocks, kv_type};
    const Kernels& kernels = select_kernels(variant);
    const nb::gil_scoped_release release;
    decoder_ = std::make_unique<Decoder>(pool, kernels, s, kv, embedding, head, norm,
                                         std::move(native));
  }

  void forward(Input<int32_t, 1> token_ids, Input<int32_t, 1> positions, Input<int64_t, 1> slots,
               Input<int32_t, 1> query_starts, Input<int32_t, 1> context_lens,
               Input<int32_t, 2> block_tables, Input<int32_t, 1> logit_rows,
               Output<float, 2> logits) {
    Step step;
    step.tokens = static_cast<int>(token_ids.size());
    step.chunks = static_cast<int>(context_lens.size());
    step.logits = static_cast<int>(logit_rows.size());
    step.table_width = static_cast<int>(block_tables.shape(1));
    const auto tokens = token_ids.size();
    require(positions.size() == tokens && slots.size() == tokens,
            "token_ids, positions and slots must have one length");
    require(query_starts.size() == context_lens.size() + 1, "query_starts must be [slices + 1]");
    require(block_tables.shape(0) == context_lens.size(), "block_tables must be [slices, blocks]");
    require(logits.shape(0) == logit_rows.size() && logits.shape(1) == static_cast<size_t>(vocab_),
            "logits must be [logit rows, vocabulary]");
    step.token_ids = elements(token_ids, "token_ids");
    step.positions = elements(positions, "positions");
    step.slots = elements(slots, "slots");
    step.query_starts = elements(query_starts, "query_starts");
    step.context_lens = elements(context_lens, "context_lens");
    step.block_tables = elements(block_tables, "block_tables");
    step.logit_rows = elements(logit_rows, "logit_rows");
    float* out = elements(logits, "logits");
    const nb::gil_scoped_release release;
    decoder_->forward(step, out);
  }

  nb::dict profile(bool enabled) {
    const Profile::Seconds seconds = decoder_->take_profile(enabled);
    nb::dict parts;
    for (size_t i = 0; i < kParts; ++i) parts[kPartNames[i]] = seconds[i];
    return parts;
  }

  static DecoderShape read_shape(const nb::dict& d) {
    DecoderShape s;
    s.hidden = nb::cast<int>(d["hidden"]);
    s.intermediate = nb::cast<int>(d["intermediate"]);
    s.heads = nb::cast<int>(d["heads"]);
    s.kv_heads = nb::cast<int>(d["kv_heads"]);
    s.head_dim = nb::cast<int>(d["head_dim"]);
    s.vocab = nb::cast<int>(d["vocab"]);
    s.norm_eps = nb::cast<float>(d["norm_eps"]);
    s.attention_scale = nb::cast<float>(d["attention_scale"]);
    s.embedding_scale = nb::cast<float>(d["embedding_scale"]);
    s.activation = nb::cast<Activation>(d["activation"]);
    s.inverse_frequencies = nb::cast<std::vector<std::vector<float>>>(d["inverse_frequencies"]);
    require(s.heads > 0 && s.kv_heads > 0 && s.heads % s.kv_heads == 0,
            "heads must be a multiple of kv_heads");
    require(s.head_dim > 0 && s.head_dim % 2 == 0, "head_dim must be even");
    require(int64_t{s.heads} * s.head_dim <= kMostWidth, "the heads are too many or too large");
    for (const std::vector<float>& f : s.inverse_frequencies) {
      require(f.size() == static_cast<size_t>(s.head_dim / 2),
              "inverse_frequencies must be [head_dim / 2]");
    }
    return s;
  }

 private:
  LayerWeights read_layer(const DecoderShape& s, const nb::dict& d) {
    const int q = s.heads * s.head_dim, kv = s.kv_heads * s.head_dim;
    LayerWeights w;
    w.q = linear_of(d, "q", q, s.hidden);
    w.k = linear_of(d, "k", kv, s.hidden);
    w.v = linear_of(d, "v", kv, s.hidden);
    w.o = linear_of(d, "o", s.hidden, q);
    w.gate = linear_of(d, "gate", s.intermediate, s.hidden);
    w.up = linear_of(d, "up", s.intermediate, s.hidden);
    w.down = linear_of(d, "down", s.hidden, s.intermediate);
    w.attention_norm = vector(d, "attention_norm", s.hidden, true);
    w.mlp_norm = vector(d, "mlp_norm", s.hidden, true);
    w.q_norm = vector(d, "q_norm", s.head_dim, false);
    w.k_norm = vector(d, "k_norm", s.head_dim, false);
    w.post_attention_norm = vector(d, "post_attention_norm", s.hidden, false);
    w.post_mlp_norm = vector(d, "post_mlp_norm", s.hidden, false);
    w.window = nb::cast<int>(d["window"]);
    w.rope_table = nb::cast<int>(d["rope_table"]);
    require(w.window >= 0, "window must not be negative");
    require(w.rope_table >= 0 &&
                static_cast<size_t>(w.rope_table) < s.inverse_frequencies.size(),
            "rope_table out of range");
    return w;
  }

  Matrix matrix(const nb::dict& d, const char* name, int rows, int cols) {
    const nb::object held = nb::cast<nb::object>(d[name]);
    const Matrix& m = nb::cast<const PackedMatrix&>(held).matrix;
    require(m.rows == rows && m.cols == cols, std::string(name) + " has the wrong shape");
    matrices_.push_back(held);
    return m;
  }

  const float* vector(const nb::dict& d, const std::string& name, int size, bool required) {
    if (!d.contains(name.c_str())) {
      require(!required, name + " is missing");
      return nullptr;
    }
    Floats array;
    require(nb::try_cast(d[name.c_str()], array, false), name + " must be float32, in one piece");
    require(array.size() == static_cast<size_t>(size), name + " has the wrong size");
    vectors_.push_back(array);
    return elements(array, name);
  }

  Linear linear_of(const nb::dict& d, const char* name, int rows, int cols) {
    return {matrix(d, name, rows, cols), vector(d, std::string(name) + "_bias", rows, false)};
  }

  std::vector<nb::object> matrices_;
  std::vector<Floats> vectors_;
  std::unique_ptr<Decoder> decoder_;
  int vocab_ = 0;
};

int64_t kv_block_bytes(const nb::dict& shape, int layers, int block_size, KvType kv_type) {
  return Decoder::kv_block_bytes(BoundDecoder::read_shape(shape), layers, block_size,
                                 kv_type);
}

}  // namespace

void bind_decoder(nb::module_& m) {
  nb::enum_<KvType>(m, "KvType").value("F32", KvType::F32).value("BF16", KvType::BF16);
  nb::enum_<Activation>(m, "Activation")
      .value("SILU", Activation::Silu)
      .value("GELU_TANH", Activation::GeluTanh);
  m.def("kv_block_bytes", &kv_block_bytes, nb::arg("shape"), nb::arg("layers"),
        nb::arg("block_size"), nb::arg("kv_type"));
  nb::class_<BoundDecoder>(m, "Decoder")
      .def(nb::init<ThreadPool&, const std::string&, const nb::dict&, const nb::dict&,
                    const nb::list&, int, int, KvType>(),
           nb::keep_alive<1, 2>(), nb::arg("pool"), nb::arg("variant"), nb::arg("shape"),
           nb::arg("weights"), nb::arg("layers"), nb::arg("block_size"), nb::arg("num_blocks"),
           nb::arg("kv_type"))
      .def("forward", &BoundDecoder::forward, array_arg("token_ids"), array_arg("positions"),
           array_arg("slots"), array_arg("query_starts"), array_arg("context_lens"),
           array_arg("block_tables"), array_arg("logit_rows"), array_arg("logits"))
      .def("profile", &BoundDecoder::profile, nb::arg("enabled"),
           "Seconds by part of the passes since the last call; measures on if `enabled`.");
}

}  // namespace slipstream
