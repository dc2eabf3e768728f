// What the parts of the Python module share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>

#include "formats.h"
#include "require.h"

namespace slipstream {

namespace nb = nanobind;

template <class T, int kDims>
using Input = nb::ndarray<const T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;
template <class T, int kDims>
using Output = nb::ndarray<T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;
using Bytes = Input<uint8_t, 1>;
using Floats = Input<float, 1>;

inline void require(bool ok, const std::string& what) { require(ok, what.c_str()); }

// The elements of an array, which numpy may have made at any address.
template <class Array>
auto* elements(const Array& array, const std::string& name) {
  auto* data = array.data();
  require(reinterpret_cast<uintptr_t>(data) % sizeof(*data) == 0, name + " must be aligned");
  return data;
}

// An array that is taken as it is: results written to a converted copy would be lost.
inline auto array_arg(const char* name) { return nb::arg(name).noconvert(); }

inline Matrix shaped(Format format, int rows, int cols) {
  require(rows > 0 && cols > 0, "a matrix needs at least one row and one column");
  Matrix m;
  m.format = format;
  m.rows = rows;
  m.cols = cols;
  return m;
}

// A packed matrix and the buffer it lies in.
struct PackedMatrix {
  Matrix matrix;
  Bytes data;

  PackedMatrix(Format format, int rows, int cols, Bytes bytes)
      : matrix(shaped(format, rows, cols)), data(std::move(bytes)) {
    require(data.size() >= matrix.bytes(), "the buffer is smaller than the packed matrix");
    require(reinterpret_cast<uintptr_t>(data.data()) % 64 == 0, "the buffer must be 64-byte aligned");
    matrix.data = data.data();
  }
};

void bind_decoder(nb::module_& m);

}  // namespace slipstream
