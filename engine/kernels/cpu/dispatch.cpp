#include <stdexcept>

#include "kernels.h"

#if defined(SLIPSTREAM_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(SLIPSTREAM_NEON)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace slipstream {

#if !defined(SLIPSTREAM_AVX2)
const Kernels* avx2_kernels() { return nullptr; }
#endif
#if !defined(SLIPSTREAM_AVX512)
const Kernels* avx512_kernels() { return nullptr; }
#endif
#if !defined(SLIPSTREAM_AMX)
const Kernels* amx_kernels() { return nullptr; }
#endif
#if !defined(SLIPSTREAM_NEON)
const Kernels* neon_kernels() { return nullptr; }
#endif

namespace {

bool has_avx2() {
#if defined(SLIPSTREAM_AVX2)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

bool has_avx512() {
#if defined(SLIPSTREAM_AVX512)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

// AMX needs the CPU's leaf and the kernel's permission to use its 8 KiB of tile state.
bool has_amx() {
#if defined(SLIPSTREAM_AMX)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  unsigned a = 0, b = 0, c = 0, d = 0;
  __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
  const bool tile = d & (1u << 24), int8 = d & (1u << 25);
  return has_avx512() && tile && int8 &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool has_neon() {
#if defined(SLIPSTREAM_NEON)
  return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
  return false;
#endif
}

}  // namespace

std::vector<const Kernels*> runnable_kernels() {
  std::vector<const Kernels*> found;
  if (has_amx()) found.push_back(amx_kernels());
  if (has_avx512()) found.push_back(avx512_kernels());
  if (has_avx2()) found.push_back(avx2_kernels());
  if (has_neon()) found.push_back(neon_kernels());
  found.push_back(scalar_kernels());
  return found;
}

std::vector<const Kernels*> compiled_kernels() {
  std::vector<const Kernels*> found;
  for (const Kernels* kernels : {amx_kernels(), avx512_kernels(), avx2_kernels(), neon_kernels(), scalar_kernels()})
    if (kernels != nullptr) found.push_back(kernels);
  return found;
}

const Kernels& select_kernels(const std::string& name) {
  std::string names;
  for (const Kernels* kernels : runnable_kernels()) {
    if (name.empty() || name == kernels->name) return *kernels;
    names += std::string(names.empty() ? "" : ", ") + kernels->name;
  }
  throw std::invalid_argument("this machine can't run the kernel variant '" + name +
                              "'; it has: " + names);
}

}  // namespace slipstream
