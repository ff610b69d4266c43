// Exponentials and the functions of gates, on one number, written so that loops over them vectorise.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace amp {

// exp(x) to about one unit in the last place: 2^n times a polynomial (Cephes' expf).
inline float exponential(float x) {
  x = std::min(std::max(x, -87.0f), 88.0f);
  const float n = std::nearbyint(x * 1.44269504f);
  const float r = __builtin_fmaf(n, 2.12194440e-4f, __builtin_fmaf(n, -0.693359375f, x));
  float p = 1.9875691500e-4f;
  p = __builtin_fmaf(p, r, 1.3981999507e-3f);
  p = __builtin_fmaf(p, r, 8.3334519073e-3f);
  p = __builtin_fmaf(p, r, 4.1665795894e-2f);
  p = __builtin_fmaf(p, r, 1.6666665459e-1f);
  p = __builtin_fmaf(p, r, 5.0000001201e-1f);
  p = __builtin_fmaf(p, r * r, r) + 1.0f;
  const int32_t power = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &power, sizeof scale);
  return p * scale;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

inline float hyperbolic(float x) {  // tanh; near 0, where the quotient loses digits, by its series
  const float square = x * x;
  float series = __builtin_fmaf(square, -17.0f / 315.0f, 2.0f / 15.0f);
  series = __builtin_fmaf(series, square, -1.0f / 3.0f);
  series = __builtin_fmaf(series * square, x, x);
  const float quotient = 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);
  return square < 0.04f ? series : (x != x ? x : quotient);
}

}  // namespace amp
