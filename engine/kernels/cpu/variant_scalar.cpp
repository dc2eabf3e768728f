#include "simd_scalar.h"

#include "table_impl.h"

namespace slipstream {

const Kernels* scalar_kernels() {
  static constexpr Kernels kTable = make_table("scalar");
  return &kTable;
}

}  // namespace slipstream
