// Python bindings: plain buffers in and out, the GIL released while kernels run.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "decoder.h"
#include "kernels.h"
#include "pack.h"
#include "rounding.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace slipstream;

namespace {

template <class T, int kDims>
using Input = nb::ndarray<const T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;
template <class T, int kDims>
using Output = nb::ndarray<T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;
using Bytes = Input<uint8_t, 1>;
using Floats = Input<float, 1>;

void require(bool ok, const std::string& what) {
  if (!ok) throw std::invalid_argument(what);
}

// The elements of an array, which numpy may have made at any address.
template <class Array>
auto* elements(const Array& array, const std::string& name) {
  auto* data = array.data();
  require(reinterpret_cast<uintptr_t>(data) % sizeof(*data) == 0, name + " must be aligned");
  return data;
}

Format checked_format(int format) {
  require(format >= 0 && format < kFormats, "unknown packed format " + std::to_string(format));
  return static_cast<Format>(format);
}

Matrix shaped(int format, int rows, int cols) {
  require(rows > 0 && cols > 0, "a matrix needs at least one row and one column");
  Matrix m;
  m.format = checked_format(format);
  m.rows = rows;
  m.cols = cols;
  return m;
}

KvType checked_kv_type(int type) {
  require(type == 0 || type == 1, "unknown KV type " + std::to_string(type));
  return static_cast<KvType>(type);
}

// A packed matrix and the buffer it lies in.
struct PackedMatrix {
  Matrix matrix;
  Bytes data;

  PackedMatrix(int format, int rows, int cols, Bytes bytes)
      : matrix(shaped(format, rows, cols)), data(std::move(bytes)) {
    require(data.size() >= matrix.bytes(), "the buffer is smaller than the packed matrix");
    require(reinterpret_cast<uintptr_t>(data.data()) % 64 == 0, "the buffer must be 64-byte aligned");
    matrix.data = data.data();
  }
};

void pack_gguf(ThreadPool& pool, int ggml_type, Bytes source, int format, int rows, int cols,
               int rotary_heads, Output<uint8_t, 1> out) {
  const Matrix m = shaped(format, rows, cols);
  require(can_round_to(m.format) || m.format == format_for_gguf(ggml_type),
          "GGUF blocks pack to int8, int4 or the format of their type");
  require(source.size() == static_cast<size_t>(gguf_row_bytes(ggml_type, cols) * rows),
          "the source does not have the tensor's size");
  require(out.size() == m.bytes(), "the output does not have the packed matrix's size");
  require(rotary_heads >= 0 && (rotary_heads == 0 || rows % (2 * rotary_heads) == 0),
          "rows must be whole heads of even size");
  const GgufSource from{ggml_type, source.data(), rotary_heads};
  uint8_t* to = out.data();
  const nb::gil_scoped_release release;
  const ThreadPool::Region region(pool);
  pool.run(m.tiles(), 4, [&](int begin, int end, int) { pack_gguf_tiles(from, m, to, begin, end); });
}

void pack_floats(ThreadPool& pool, int type, Bytes source, int format, int rows, int cols,
                 Output<uint8_t, 1> out) {
  const Matrix m = shaped(format, rows, cols);
  require(type >= 0 && type <= 2, "unknown float type");
  require(can_round_to(m.format) || format == type, "floats pack to int8, int4 or their own type");
  require(source.size() == static_cast<size_t>(rows) * static_cast<size_t>(cols) * (type == 0 ? 4 : 2),
          "the source does not have the tensor's size");
  require(out.size() == m.bytes(), "the output does not have the packed matrix's size");
  const uint8_t* from = source.data();
  uint8_t* to = out.data();
  const nb::gil_scoped_release release;
  const ThreadPool::Region region(pool);
  pool.run(m.tiles(), 4, [&](int begin, int end, int) {
    pack_float_tiles(static_cast<FloatType>(type), from, m, to, begin, end);
  });
}

void dequantize(const PackedMatrix& packed, int first_row, Output<float, 2> out) {
  const Matrix& m = packed.matrix;
  require(out.shape(1) == static_cast<size_t>(m.cols), "the output needs the matrix's columns");
  require(first_row >= 0 && first_row + static_cast<int64_t>(out.shape(0)) <= m.rows,
          "rows out of range");
  float* to = elements(out, "out");
  for (size_t i = 0; i < out.shape(0); ++i) {
    dequantize_row(m, first_row + static_cast<int>(i), to + i * out.shape(1));
  }
}

// Rows quantized as a decoder layer does it, for tests and benchmarks of single layers.
class QuantizedInput {
 public:
  QuantizedInput(const Kernels& kernels, const float* x, int rows, int cols, bool precise) {
    input_.x = x;
    input_.stride = cols;
    input_.rows = rows;
    QuantizedRows& q = input_.quantized;
    q.rows = precise ? 2 * rows : rows;
    q.groups = static_cast<int>(round_up(ceil_div(cols, kGroup), 8));
    const size_t groups = static_cast<size_t>(q.rows) * static_cast<size_t>(q.groups);
    q.q = values_.ensure<int8_t>(groups * kGroup);
    q.scale = scale_.ensure<float>(groups);
    q.scaled_sum = scaled_sum_.ensure<float>(groups);
    q.negated_sums = sums_.ensure<int32_t>(groups * kSumKinds);
    for (int r = 0; r < rows; ++r) {
      kernels.quantize_groups(x + int64_t{r} * cols, cols, r, precise ? rows + r : -1, 0, q.groups,
                              q);
    }
  }
  const LinearInput& input() const { return input_; }

 private:
  LinearInput input_;
  Buffer values_, scale_, scaled_sum_, sums_;
};

void run_linear(ThreadPool& pool, const Kernels& kernels, const Matrix& m, const LinearInput& in,
                const LinearOutput& to) {
  pool.run(m.tiles(), linear_grain(m.tiles(), pool.threads()), [&](int begin, int end, int) {
    kernels.linear_tiles(m, in, begin, end, to);
  });
}

// x [T, cols] -> out [T, rows]; `precise`: with the remainder that rounding x leaves.
void linear(ThreadPool& pool, const std::string& variant, const PackedMatrix& packed,
            Input<float, 2> x, Output<float, 2> out, bool precise) {
  const Matrix& m = packed.matrix;
  const Kernels& kernels = select_kernels(variant);
  require(x.shape(1) == static_cast<size_t>(m.cols), "x needs the matrix's columns");
  require(out.shape(0) == x.shape(0) && out.shape(1) == static_cast<size_t>(m.rows),
          "out must be [T, rows]");
  const int rows = static_cast<int>(x.shape(0));
  const QuantizedInput in(kernels, elements(x, "x"), rows, m.cols, precise);
  const LinearOutput to{elements(out, "out"), m.rows, rows, nullptr, false};
  const nb::gil_scoped_release release;
  const ThreadPool::Region region(pool);
  run_linear(pool, kernels, m, in.input(), to);
}

// Seconds that each pass over matrices of one shape takes with inputs x [T, cols].
std::vector<double> time_linear(ThreadPool& pool, const std::string& variant,
                                const std::vector<const PackedMatrix*>& matrices,
                                Input<float, 2> x, int passes) {
  require(!matrices.empty() && matrices[0] != nullptr, "no matrices to time");
  const Kernels& kernels = select_kernels(variant);
  const int rows = static_cast<int>(x.shape(0)), width = matrices[0]->matrix.rows;
  for (const PackedMatrix* packed : matrices) {
    require(packed != nullptr && x.shape(1) == static_cast<size_t>(packed->matrix.cols) &&
                packed->matrix.rows == width,
            "matrices and x must have one shape");
  }
  const QuantizedInput in(kernels, elements(x, "x"), rows, matrices[0]->matrix.cols, false);
  Buffer out;
  const LinearOutput to{out.ensure<float>(static_cast<size_t>(rows) * static_cast<size_t>(width)),
                        width, rows, nullptr, false};
  std::vector<double> seconds;
  const nb::gil_scoped_release release;
  const ThreadPool::Region region(pool);
  for (int i = 0; i < passes; ++i) {
    const auto started = std::chrono::steady_clock::now();
    for (const PackedMatrix* packed : matrices) {
      run_linear(pool, kernels, packed->matrix, in.input(), to);
    }
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count());
  }
  return seconds;
}

struct Found {
  std::vector<int64_t> rows, columns;
};

// Rows and columns of the tokens that may win each row's draw.
nb::tuple likely_winners(const std::string& variant, Input<float, 2> logits, Floats lowest,
                         Floats score_to_beat, Input<int64_t, 1> keys,
                         Input<int64_t, 1> noise_ids) {
  const Kernels& kernels = select_kernels(variant);
  const size_t rows = logits.shape(0), vocab = logits.shape(1);
  require(lowest.size() == rows && score_to_beat.size() == rows && keys.size() == rows,
          "lowest, score_to_beat and keys must have one entry a row");
  require(noise_ids.size() == vocab, "noise_ids must be [vocabulary]");
  const float* row_logits = elements(logits, "logits");
  const float* lowest_of = elements(lowest, "lowest");
  const float* score_of = elements(score_to_beat, "score_to_beat");
  const int64_t* key_of = elements(keys, "keys");
  const int64_t* ids = elements(noise_ids, "noise_ids");
  auto found = std::make_unique<Found>();
  {
    const nb::gil_scoped_release release;
    std::vector<int32_t> columns(vocab);
    for (size_t r = 0; r < rows; ++r) {
      const DrawRow row{row_logits + r * vocab, ids, static_cast<uint64_t>(key_of[r]), lowest_of[r],
                        score_of[r]};
      const int count = kernels.likely_winners(row, 0, static_cast<int>(vocab), columns.data());
      found->rows.insert(found->rows.end(), static_cast<size_t>(count), static_cast<int64_t>(r));
      found->columns.insert(found->columns.end(), columns.begin(), columns.begin() + count);
    }
  }
  const size_t count = found->rows.size();
  Found* raw = found.release();
  const nb::capsule owner(raw, [](void* p) noexcept { delete static_cast<Found*>(p); });
  using Array = nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>;
  return nb::make_tuple(Array(raw->rows.data(), {count}, owner),
                        Array(raw->columns.data(), {count}, owner));
}

uint64_t read_bytes(ThreadPool& pool, const std::string& variant, Bytes data) {
  const Kernels& kernels = select_kernels(variant);
  constexpr size_t kPiece = size_t{1} << 20;
  const uint8_t* base = data.data();
  const int pieces = static_cast<int>(data.size() / kPiece);
  std::vector<uint64_t> sums(static_cast<size_t>(pool.threads()) * 8);
  const nb::gil_scoped_release release;
  const ThreadPool::Region region(pool);
  pool.run(pieces, 4, [&](int begin, int end, int thread) {
    const size_t bytes = static_cast<size_t>(end - begin) * kPiece;
    sums[static_cast<size_t>(thread) * 8] +=
        kernels.read(base + static_cast<size_t>(begin) * kPiece, bytes);
  });
  uint64_t total = 0;
  for (uint64_t s : sums) total += s;
  return total;
}

// A decoder and every Python buffer its weights lie in.
class BoundDecoder {
 public:
  static constexpr int64_t kMostWidth = 1 << 24;

  BoundDecoder(ThreadPool& pool, const std::string& variant, const nb::dict& shape,
               const nb::dict& weights, const nb::list& layers, int block_size, int num_blocks,
               int kv_type) {
    const DecoderShape s = read_shape(shape);
    std::vector<LayerWeights> native;
    for (nb::handle layer : layers) native.push_back(read_layer(s, nb::cast<nb::dict>(layer)));
    const Matrix embedding = matrix(weights, "embedding", s.vocab, s.hidden);
    const Linear head = linear_of(weights, "head", s.vocab, s.hidden);
    const float* norm = vector(weights, "final_norm", s.hidden, true);
    vocab_ = s.vocab;
    const KvShape kv{block_size, num_blocks, checked_kv_type(kv_type)};
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
    step.slices = static_cast<int>(context_lens.size());
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
    s.activation = nb::cast<bool>(d["gelu"]) ? Activation::GeluTanh : Activation::Silu;
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

int64_t kv_block_bytes(const nb::dict& shape, int layers, int block_size, int kv_type) {
  return Decoder::kv_block_bytes(BoundDecoder::read_shape(shape), layers, block_size,
                                 checked_kv_type(kv_type));
}

std::vector<std::string> variants() {
  std::vector<std::string> names;
  for (const Kernels* kernels : runnable_kernels()) names.emplace_back(kernels->name);
  return names;
}

// An array that is taken as it is: results written to a converted copy would be lost.
auto array_arg(const char* name) { return nb::arg(name).noconvert(); }

}  // namespace

NB_MODULE(_native, m) {
  m.def("variants", &variants, "Kernel variants this machine can run, fastest first.");
  m.def("format_for_gguf", [](int type) { return static_cast<int>(format_for_gguf(type)); },
        nb::arg("ggml_type"));
  m.def("gguf_row_bytes", &gguf_row_bytes, nb::arg("ggml_type"), nb::arg("cols"));
  m.def("packed_bytes", [](int format, int rows, int cols) { return shaped(format, rows, cols).bytes(); },
        nb::arg("format"), nb::arg("rows"), nb::arg("cols"));
  nb::class_<ThreadPool>(m, "ThreadPool")
      .def(nb::init<int>(), nb::arg("threads"))
      .def_prop_ro("threads", &ThreadPool::threads);
  nb::class_<PackedMatrix>(m, "PackedMatrix")
      .def(nb::init<int, int, int, Bytes>(), nb::arg("format"), nb::arg("rows"), nb::arg("cols"),
           array_arg("data"))
      .def_prop_ro("format", [](const PackedMatrix& p) { return static_cast<int>(p.matrix.format); })
      .def_prop_ro("rows", [](const PackedMatrix& p) { return p.matrix.rows; })
      .def_prop_ro("cols", [](const PackedMatrix& p) { return p.matrix.cols; })
      .def_prop_ro("nbytes", [](const PackedMatrix& p) { return p.matrix.bytes(); })
      .def("dequantize", &dequantize, nb::arg("first_row"), array_arg("out"));
  m.def("pack_gguf", &pack_gguf, nb::arg("pool"), nb::arg("ggml_type"), array_arg("source"),
        nb::arg("format"), nb::arg("rows"), nb::arg("cols"), nb::arg("rotary_heads"),
        array_arg("out"));
  m.def("pack_floats", &pack_floats, nb::arg("pool"), nb::arg("type"), array_arg("source"),
        nb::arg("format"), nb::arg("rows"), nb::arg("cols"), array_arg("out"));
  m.def("linear", &linear, nb::arg("pool"), nb::arg("variant"), nb::arg("matrix"), array_arg("x"),
        array_arg("out"), nb::arg("precise") = false);
  m.def("time_linear", &time_linear, nb::arg("pool"), nb::arg("variant"), nb::arg("matrices"),
        array_arg("x"), nb::arg("passes"));
  m.def("likely_winners", &likely_winners, nb::arg("variant"), nb::arg("logits"),
        nb::arg("lowest"), nb::arg("score_to_beat"), nb::arg("keys"), nb::arg("noise_ids"));
  m.def("read_bytes", &read_bytes, nb::arg("pool"), nb::arg("variant"), array_arg("data"));
  m.def("kv_block_bytes", &kv_block_bytes, nb::arg("shape"), nb::arg("layers"),
        nb::arg("block_size"), nb::arg("kv_type"));
  nb::class_<BoundDecoder>(m, "Decoder")
      .def(nb::init<ThreadPool&, const std::string&, const nb::dict&, const nb::dict&,
                    const nb::list&, int, int, int>(),
           nb::keep_alive<1, 2>(), nb::arg("pool"), nb::arg("variant"), nb::arg("shape"),
           nb::arg("weights"), nb::arg("layers"), nb::arg("block_size"), nb::arg("num_blocks"),
           nb::arg("kv_type"))
      .def("forward", &BoundDecoder::forward, array_arg("token_ids"), array_arg("positions"),
           array_arg("slots"), array_arg("query_starts"), array_arg("context_lens"),
           array_arg("block_tables"), array_arg("logit_rows"), array_arg("logits"));
}
