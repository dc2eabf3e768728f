// Python bindings: plain buffers in and out, the GIL released while kernels run.
#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "bindings.h"
#include "buffer.h"
#include "kernels.h"
#include "pack.h"
#include "rounding.h"
#include "thread_pool.h"

using namespace slipstream;

namespace {

void pack_gguf(ThreadPool& pool, int ggml_type, Bytes source, Format format, int rows, int cols,
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

void pack_floats(ThreadPool& pool, Format source_format, Bytes source, Format format, int rows,
                 int cols, Output<uint8_t, 1> out) {
  const Matrix m = shaped(format, rows, cols);
  require(!is_quantized(source_format), "unknown float type");
  require(can_round_to(format) || format == source_format, "floats pack to int8, int4 or their own type");
  require(source.size() == static_cast<size_t>(rows) * static_cast<size_t>(cols) *
                               static_cast<size_t>(format_info(source_format).element_bytes),
          "the source does not have the tensor's size");
  require(out.size() == m.bytes(), "the output does not have the packed matrix's size");
  const uint8_t* from = source.data();
  uint8_t* to = out.data();
  const nb::gil_scoped_release release;
  const ThreadPool::Region region(pool);
  pool.run(m.tiles(), 4, [&](int begin, int end, int) {
    pack_float_tiles(source_format, from, m, to, begin, end);
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

PackedMatrix first_rows(const PackedMatrix& packed, int rows) {
  require(rows <= packed.matrix.rows, "the matrix has fewer rows");
  return PackedMatrix(packed.matrix.format, rows, packed.matrix.cols, packed.data);
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
  pool.run_in_order(m.tiles(), linear_grain(m.tiles(), pool.threads()), [&](int begin, int end, int) {
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
  constexpr size_t kTaskBytes = size_t{1} << 20;
  const uint8_t* base = data.data();
  const int tasks = static_cast<int>(data.size() / kTaskBytes);
  std::vector<uint64_t> sums(static_cast<size_t>(pool.threads()) * 8);
  const nb::gil_scoped_release release;
  const ThreadPool::Region region(pool);
  pool.run(tasks, 4, [&](int begin, int end, int thread) {
    const size_t bytes = static_cast<size_t>(end - begin) * kTaskBytes;
    sums[static_cast<size_t>(thread) * 8] +=
        kernels.read(base + static_cast<size_t>(begin) * kTaskBytes, bytes);
  });
  uint64_t total = 0;
  for (uint64_t s : sums) total += s;
  return total;
}

std::vector<std::string> names_of(const std::vector<const Kernels*>& some) {
  std::vector<std::string> names;
  for (const Kernels* kernels : some) names.emplace_back(kernels->name);
  return names;
}

}  // namespace

NB_MODULE(_native, m) {
  nb::enum_<Format>(m, "Format", nb::is_arithmetic())
      .value("F32", Format::F32)
      .value("F16", Format::F16)
      .value("BF16", Format::BF16)
      .value("Q4_AFFINE", Format::Q4Affine)
      .value("Q4_SYMMETRIC", Format::Q4Symmetric)
      .value("Q4_SUPER", Format::Q4Super)
      .value("Q6_SUPER", Format::Q6Super)
      .value("Q8_SYMMETRIC", Format::Q8Symmetric)
      .value("Q8_AFFINE", Format::Q8Affine)
      .value("Q4_TABLE", Format::Q4Table)
      .value("Q4_TABLE_SUPER", Format::Q4TableSuper);
  m.def("variants", [] { return names_of(runnable_kernels()); }, "Kernel variants this machine can run, fastest first.");
  m.def("compiled_variants", [] { return names_of(compiled_kernels()); }, "Kernel variants this build has, for any machine.");
  m.def("format_for_gguf", &format_for_gguf, nb::arg("ggml_type"));
  m.def("gguf_row_bytes", &gguf_row_bytes, nb::arg("ggml_type"), nb::arg("cols"));
  m.def("packed_bytes", [](Format format, int rows, int cols) { return shaped(format, rows, cols).bytes(); },
        nb::arg("format"), nb::arg("rows"), nb::arg("cols"));
  nb::class_<ThreadPool>(m, "ThreadPool")
      .def(nb::init<int>(), nb::arg("threads"))
      .def_prop_ro("threads", &ThreadPool::threads);
  nb::class_<PackedMatrix>(m, "PackedMatrix")
      .def(nb::init<Format, int, int, Bytes>(), nb::arg("format"), nb::arg("rows"), nb::arg("cols"),
           array_arg("data"))
      .def_prop_ro("format", [](const PackedMatrix& p) { return p.matrix.format; })
      .def_prop_ro("rows", [](const PackedMatrix& p) { return p.matrix.rows; })
      .def_prop_ro("cols", [](const PackedMatrix& p) { return p.matrix.cols; })
      .def_prop_ro("nbytes", [](const PackedMatrix& p) { return p.matrix.bytes(); })
      .def("first_rows", &first_rows, nb::arg("rows"), "The matrix of the first rows, in place.")
      .def("dequantize", &dequantize, nb::arg("first_row"), array_arg("out"));
  m.def("pack_gguf", &pack_gguf, nb::arg("pool"), nb::arg("ggml_type"), array_arg("source"),
        nb::arg("format"), nb::arg("rows"), nb::arg("cols"), nb::arg("rotary_heads"),
        array_arg("out"));
  m.def("pack_floats", &pack_floats, nb::arg("pool"), nb::arg("source_format"), array_arg("source"),
        nb::arg("format"), nb::arg("rows"), nb::arg("cols"), array_arg("out"));
  m.def("linear", &linear, nb::arg("pool"), nb::arg("variant"), nb::arg("matrix"), array_arg("x"),
        array_arg("out"), nb::arg("precise") = false);
  m.def("time_linear", &time_linear, nb::arg("pool"), nb::arg("variant"), nb::arg("matrices"),
        array_arg("x"), nb::arg("passes"));
  m.def("likely_winners", &likely_winners, nb::arg("variant"), nb::arg("logits"),
        nb::arg("lowest"), nb::arg("score_to_beat"), nb::arg("keys"), nb::arg("noise_ids"));
  m.def("read_bytes", &read_bytes, nb::arg("pool"), nb::arg("variant"), array_arg("data"));
  bind_decoder(m);
}
