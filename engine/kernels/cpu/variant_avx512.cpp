#include "simd_avx512.h"

#include "table_impl.h"

namespace slipstream {

const Kernels* avx512_kernels() {
  static constexpr Kernels kTable = make_table("avx512");
  return &kTable;
}

}  // namespace slipstream
