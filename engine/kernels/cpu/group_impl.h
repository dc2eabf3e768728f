// Weights of a group of 32 columns, as the kernels of the including variant's Simd want them.
#pragma once

#include <type_traits>

#include "kernels.h"

namespace slipstream {
namespace {

// How far a kernel fetches ahead of the weights it reads, into the first and the second cache: the
// first has too few fill buffers to hide all of the memory's latency (measured, both together).
constexpr int kNearBytes = 2048;
constexpr int kFarBytes = 8192;

SLIPSTREAM_INLINE void prefetch_ahead(const uint8_t* data, int bytes) {
  for (int b = 0; b < bytes; b += kVectorBytes) Simd::prefetch_near(data + b + kNearBytes);
  for (int b = 0; b < bytes; b += kVectorBytes) Simd::prefetch_far(data + b + kFarBytes);
}

struct GroupScales {
  Simd::F first;   // scale of the group, or of its low half
  Simd::F second;  // minimum, or the scale of the high half
};

template <Format F>
constexpr bool kAffine = F == Format::Q4Affine || F == Format::Q4Super || F == Format::Q8Affine;

template <Format F>
constexpr bool kTable = F == Format::Q4Table || F == Format::Q4TableSuper;

// Weights that are signed bytes, unless the variant's dot product wants them unsigned.
template <Format F>
constexpr bool kSignedBytes = F == Format::Q8Symmetric || kTable<F>;

// What unsigned weights are above the signed ones, as a power of two.
template <Format F>
constexpr int kOffset = F == Format::Q4Symmetric                  ? 8
                        : F == Format::Q6Super                    ? 32
                        : kSignedBytes<F> && !Simd::kSignedDot    ? 128
                                                                  : 0;

// A block's scales that do not change from group to group.
template <Format F>
struct BlockScales {
  explicit BlockScales(const uint8_t*) {}
};

template <>
struct BlockScales<Format::Q4Super> {
  Simd::F scale, minimum;
  explicit BlockScales(const uint8_t* block)
      : scale(Simd::load_half(reinterpret_cast<const uint16_t*>(block))),
        minimum(Simd::sub(Simd::zero(),
                          Simd::load_half(reinterpret_cast<const uint16_t*>(block) + 16))) {}
};

template <>
struct BlockScales<Format::Q6Super> {
  Simd::F scale;
  explicit BlockScales(const uint8_t* block)
      : scale(Simd::load_half(reinterpret_cast<const uint16_t*>(block))) {}
};

template <>
struct BlockScales<Format::Q4TableSuper> : BlockScales<Format::Q6Super> {
  using BlockScales<Format::Q6Super>::BlockScales;
};

template <Format F>
SLIPSTREAM_INLINE GroupScales group_scales(const uint8_t* block, int group, const BlockScales<F>& super) {
  const uint16_t* half = reinterpret_cast<const uint16_t*>(block);
  const float* single = reinterpret_cast<const float*>(block);
  (void)super;
  if constexpr (F == Format::Q4Affine) {
    return {Simd::load_half(half), Simd::load_half(half + 16)};
  } else if constexpr (F == Format::Q8Affine) {
    return {Simd::load(single), Simd::load(single + 16)};
  } else if constexpr (F == Format::Q4Super) {
    const uint8_t* small = block + 64 + group * 32;
    return {Simd::mul(Simd::load_u8(small), super.scale),
            Simd::mul(Simd::load_u8(small + 16), super.minimum)};
  } else if constexpr (F == Format::Q6Super) {
    const int8_t* small = reinterpret_cast<const int8_t*>(block + 64 + group * 32);
    return {Simd::mul(Simd::load_s8(small), super.scale),
            Simd::mul(Simd::load_s8(small + 16), super.scale)};
  } else if constexpr (F == Format::Q4TableSuper) {
    const int8_t* small = reinterpret_cast<const int8_t*>(block + 64 + group * 32);
    return {Simd::mul(Simd::load_s8(small), super.scale), Simd::zero()};
  } else {
    return {Simd::load_half(half + 16 * group), Simd::zero()};
  }
}

// Quad `kQuad` of a packed group, as unsigned bytes unless they are signed (see kSignedBytes).
template <Format F, int kQuad>
SLIPSTREAM_INLINE Simd::Q unpack_quad(const uint8_t* data) {
  if constexpr (F == Format::Q8Symmetric || F == Format::Q8Affine) {
    const Simd::Q w = Simd::load_q(data + kQuad * kVectorBytes);
    if constexpr (kOffset<F> == 128) return Simd::flip_sign(w);
    return w;
  } else {
    const Simd::Q pair = Simd::load_q(data + kQuad / 2 * kVectorBytes);
    const Simd::Q w = kQuad % 2 == 0 ? Simd::low_nibbles(pair) : Simd::high_nibbles(pair);
    if constexpr (kTable<F>) {
      const Simd::Q levels = Simd::repeat16(kLevels);
      return Simd::look_up(kOffset<F> == 128 ? Simd::flip_sign(levels) : levels, w);
    }
    if constexpr (F == Format::Q6Super) {
      const Simd::Q tops = Simd::load_q(data + (4 + kQuad / 4) * kVectorBytes);
      return Simd::with_top<2 * (kQuad % 4)>(w, tops);
    }
    return w;
  }
}

// Calls fn(std::integral_constant<int, i>) for i in [0, kCount), each a copy of its own.
template <int kCount, int kFirst = 0, class Fn>
SLIPSTREAM_INLINE void unrolled(Fn&& fn) {
  if constexpr (kFirst < kCount) {
    fn(std::integral_constant<int, kFirst>{});
    unrolled<kCount, kFirst + 1>(fn);
  }
}

template <Format F>
SLIPSTREAM_INLINE void unpack_group(const uint8_t* data, Simd::Q w[kQuads]) {
  unrolled<kQuads>([&](auto j) SLIPSTREAM_INLINE_LAMBDA { w[j] = unpack_quad<F, j>(data); });
}

}  // namespace
}  // namespace slipstream
