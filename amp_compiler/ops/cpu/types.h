// The 16-bit types of the CPU loops, and arrays of them widened to fp32 and narrowed from it.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace amp {

struct Bf16 {
  uint16_t bits;
};
struct Half {
  _Float16 value;
};
struct None {};

enum Type : int64_t { kNone = 0, kFloat = 1, kBf16 = 2, kHalf = 3 };

inline float load(float x) { return x; }
inline float load(None) { return 0.0f; }
inline float load(Half x) { return static_cast<float>(x.value); }
inline float load(Bf16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float result;
  std::memcpy(&result, &wide, sizeof result);
  return result;
}

inline void store(float x, float* target) { *target = x; }
inline void store(float x, Half* target) { target->value = static_cast<_Float16>(x); }
inline void store(float x, Bf16* target) {  // to nearest, ties to even; a NaN stays one
  uint32_t wide;
  std::memcpy(&wide, &x, sizeof wide);
  const uint32_t rounded = (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
  target->bits = static_cast<uint16_t>(x != x ? 0x7fc0u : rounded);
}
inline void store(float, None*) {}

// 1 where a 16-bit number is not an FP32 one rounded: bit for bit, but that every NaN is one. In whole numbers, so that
// compilers vectorise it.
inline int strays(float, None) { return 0; }
inline int strays(float weight, Bf16 low) {
  uint32_t wide;
  std::memcpy(&wide, &weight, sizeof wide);
  const uint32_t rounded = (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
  const bool nan = (wide & 0x7fffffffu) > 0x7f800000u, low_nan = (low.bits & 0x7fffu) > 0x7f80u;
  return (nan != low_nan) | (!nan & (rounded != low.bits));
}
inline int strays(float weight, Half low) {
  const float beside_half = std::fabs(weight) + 0.5f;  // whose last bit is that of a subnormal number
  uint32_t wide, small;
  uint16_t bits;
  std::memcpy(&wide, &weight, sizeof wide);
  std::memcpy(&small, &beside_half, sizeof small);
  std::memcpy(&bits, &low, sizeof bits);
  const uint32_t magnitude = wide & 0x7fffffffu;
  const uint32_t normal = std::min(((magnitude + 0xfffu + ((magnitude >> 13) & 1u)) >> 13) - (112u << 10), 0x7c00u);
  const uint32_t rounded = (magnitude < 0x38800000u ? small - 0x3f000000u : normal) | ((wide >> 16) & 0x8000u);
  const bool nan = magnitude > 0x7f800000u, low_nan = (bits & 0x7fffu) > 0x7c00u;
  return (nan != low_nan) | (!nan & (rounded != bits));
}

template <class G>
void widen(const G* __restrict grads, float* __restrict out, int64_t count, float coef) {
  for (int64_t i = 0; i < count; ++i) out[i] = load(grads[i]) * coef;
}

// Whether one of them strays.
template <class L>
bool one_strays(const float* __restrict weights, const L* __restrict low_weights, int64_t count) {
  int any = 0;
#pragma omp simd reduction(| : any)
  for (int64_t i = 0; i < count; ++i) any |= strays(weights[i], low_weights[i]);
  return any != 0;
}

template <class L>
void narrow(const float* __restrict weights, L* __restrict low_weights, int64_t count) {
  for (int64_t i = 0; i < count; ++i) store(weights[i], low_weights + i);
}

#ifdef __F16C__  // compilers convert fp16 one by one where the processor has no arithmetic on it
inline __m256 load_eight(const Half* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

template <>
inline void widen<Half>(const Half* __restrict grads, float* __restrict out, int64_t count, float coef) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) _mm256_storeu_ps(out + i, _mm256_mul_ps(load_eight(grads + i), _mm256_set1_ps(coef)));
  for (; i < count; ++i) out[i] = load(grads[i]) * coef;
}

template <>
inline void narrow<Half>(const float* __restrict weights, Half* __restrict low_weights, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(weights + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(low_weights + i), half);
  }
  for (; i < count; ++i) store(weights[i], low_weights + i);
}
#endif

}  // namespace amp
