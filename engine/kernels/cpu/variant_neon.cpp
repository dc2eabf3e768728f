#include "simd_neon.h"

#include "table_impl.h"

namespace slipstream {

const Kernels* neon_kernels() {
  static constexpr Kernels kTable = make_table("neon");
  return &kTable;
}

}  // namespace slipstream
