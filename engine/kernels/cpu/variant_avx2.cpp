#include "simd_avx2.h"

#include "table_impl.h"

namespace slipstream {

const Kernels* avx2_kernels() {
  static constexpr Kernels kTable = make_table("avx2");
  return &kTable;
}

}  // namespace slipstream
