// The gradient check and the optimizer updates on a CPU: one pass over all tensors of a group, at memory bandwidth.
// The arithmetic and its order are those of runtime/update_math.py, bit for bit: fused multiply-adds stand where they
// are written and nowhere else (-ffp-contract=off).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kBlock = 16384;  // elements that one thread takes at a time
constexpr int64_t kPiece = 512;    // elements of it that go through all loops together

struct Bf16 {
  uint16_t bits;
};
struct Half {
  _Float16 value;
};
struct None {};

inline float load(float x) { return x; }
inline float load(Half x) { return static_cast<float>(x.value); }
inline float load(Bf16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float result;
  std::memcpy(&result, &wide, sizeof result);
  return result;
}

inline void store(float x, Half* target) { target->value = static_cast<_Float16>(x); }
inline void store(float x, Bf16* target) {  // to nearest, ties to even; a NaN stays one
  uint32_t wide;
  std::memcpy(&wide, &x, sizeof wide);
  const uint32_t rounded = (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
  target->bits = static_cast<uint16_t>(x != x ? 0x7fc0u : rounded);
}
inline void store(float, None*) {}

inline float sign(float x) { return static_cast<float>(x > 0.0f) - static_cast<float>(x < 0.0f); }

// One row per tensor; addresses are 0 where a column is not used.
struct Row {
  int64_t count, grad_type, low_type;
  int64_t grad, weight, first, second, largest, low, step;
};
enum Type : int64_t { kNone = 0, kFloat = 1, kBf16 = 2, kHalf = 3 };

struct AdamScalars {
  float shrink, l2, l1, weight1, beta2, weight2, eps, root, neg_step;
};
struct SgdScalars {
  float neg_lr, momentum, weight, l2, l1;
};

template <class T>
T* at(int64_t address, int64_t start) {
  return address == 0 ? nullptr : reinterpret_cast<T*>(address) + start;
}

// What follows works on pieces that stay in the nearest cache: each loop is simple enough for any compiler to vectorise,
// and what is the same for all elements is decided outside of the loops.

template <class G>
void widen(const G* __restrict grads, float* __restrict out, int64_t count, float coef) {
  for (int64_t i = 0; i < count; ++i) out[i] = load(grads[i]) * coef;
}

template <class L>
void narrow(const float* __restrict weights, L* __restrict lows, int64_t count) {
  for (int64_t i = 0; i < count; ++i) store(weights[i], lows + i);
}

#ifdef __F16C__  // compilers convert fp16 one by one where the processor has no arithmetic on it
template <>
void widen<Half>(const Half* __restrict grads, float* __restrict out, int64_t count, float coef) {
  const __m256 factor = _mm256_set1_ps(coef);
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(grads + i));
    _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_cvtph_ps(half), factor));
  }
  for (; i < count; ++i) out[i] = load(grads[i]) * coef;
}

template <>
void narrow<Half>(const float* __restrict weights, Half* __restrict lows, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(weights + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(lows + i), half);
  }
  for (; i < count; ++i) store(weights[i], lows + i);
}
#endif

void decay(float* __restrict grads, const float* __restrict weights, int64_t count, float l1, float l2) {
  if (l1 != 0.0f)
    for (int64_t i = 0; i < count; ++i) grads[i] = grads[i] + sign(weights[i]) * l1;
  if (l2 != 0.0f)
    for (int64_t i = 0; i < count; ++i) grads[i] = __builtin_fmaf(weights[i], l2, grads[i]);
}

void lerp(float* __restrict values, const float* __restrict ends, int64_t count, float weight) {  // as torch.lerp
  if (std::fabs(weight) < 0.5f)
    for (int64_t i = 0; i < count; ++i) values[i] = __builtin_fmaf(weight, ends[i] - values[i], values[i]);
  else
    for (int64_t i = 0; i < count; ++i) values[i] = __builtin_fmaf(weight - 1.0f, ends[i] - values[i], ends[i]);
}

template <class G, class L>
void adam(const Row& row, int64_t start, int64_t count, const AdamScalars& s, float coef, bool decoupled) {
  float buffer[kPiece];
  float* __restrict grads = buffer;
  float* __restrict weights = at<float>(row.weight, start);
  float* __restrict firsts = at<float>(row.first, start);
  float* __restrict seconds = at<float>(row.second, start);
  float* __restrict largests = at<float>(row.largest, start);
  widen(at<const G>(row.grad, start), grads, count, coef);
  decay(grads, weights, count, s.l1, decoupled ? 0.0f : s.l2);
  if (decoupled)
    for (int64_t i = 0; i < count; ++i) weights[i] = weights[i] * s.shrink;
  lerp(firsts, grads, count, s.weight1);
  for (int64_t i = 0; i < count; ++i)
    seconds[i] = __builtin_fmaf(grads[i] * s.weight2, grads[i], seconds[i] * s.beta2);
  const float* __restrict under = seconds;
  if (largests != nullptr) {  // as torch.maximum: a NaN wins
    for (int64_t i = 0; i < count; ++i)
      largests[i] = (largests[i] > seconds[i] || largests[i] != largests[i]) ? largests[i] : seconds[i];
    under = largests;
  }
  for (int64_t i = 0; i < count; ++i)
    weights[i] = weights[i] + (firsts[i] * s.neg_step) / (__builtin_sqrtf(under[i]) / s.root + s.eps);
  if (row.low != 0) narrow(weights, at<L>(row.low, start), count);
}

template <class G, class L>
void sgd(const Row& row, int64_t start, int64_t count, const SgdScalars& s, float coef, bool started, bool nesterov) {
  float buffer[kPiece];
  float* __restrict grads = buffer;
  float* __restrict weights = at<float>(row.weight, start);
  float* __restrict momenta = at<float>(row.first, start);
  widen(at<const G>(row.grad, start), grads, count, coef);
  decay(grads, weights, count, s.l1, s.l2);
  if (momenta != nullptr) {
    if (started)
      for (int64_t i = 0; i < count; ++i)
        momenta[i] = __builtin_fmaf(grads[i], s.weight, momenta[i] * s.momentum);
    else
      std::memcpy(momenta, grads, sizeof(float) * static_cast<size_t>(count));
    if (nesterov)
      for (int64_t i = 0; i < count; ++i) grads[i] = __builtin_fmaf(momenta[i], s.momentum, grads[i]);
    else
      std::memcpy(grads, momenta, sizeof(float) * static_cast<size_t>(count));
  }
  for (int64_t i = 0; i < count; ++i) weights[i] = __builtin_fmaf(grads[i], s.neg_lr, weights[i]);
  if (row.low != 0) narrow(weights, at<L>(row.low, start), count);
}

// Adds to the sum of the squares of the unscaled elements, and finds elements that are not finite.
template <class G>
void summary(const Row& row, int64_t start, int64_t count, float inverse, float* sum, int* bad) {
  float grads[kPiece];
  widen(at<const G>(row.grad, start), grads, count, 1.0f);
  float total = 0.0f;
  int odd = 0;
#pragma omp simd reduction(+ : total) reduction(| : odd)
  for (int64_t i = 0; i < count; ++i) {
    const float scaled = grads[i] * inverse;
    total += scaled * scaled;
    odd |= static_cast<int>(!(std::fabs(grads[i]) <= 3.402823466e38f));
  }
  *sum += total;
  *bad |= odd;
}

struct Block {
  int64_t row, start, count;
};

std::vector<Block> blocks_of(const Row* rows, int64_t tensors) {
  std::vector<Block> blocks;
  for (int64_t row = 0; row < tensors; ++row)
    for (int64_t start = 0; start < rows[row].count; start += kBlock)
      blocks.push_back({row, start, std::min(kBlock, rows[row].count - start)});
  return blocks;
}

template <class Body>
void for_blocks(const std::vector<Block>& blocks, int threads, const Body& body) {
  const int64_t count = static_cast<int64_t>(blocks.size());
#pragma omp parallel for num_threads(threads) schedule(static) if (count > 1)
  for (int64_t i = 0; i < count; ++i) body(blocks[i], i);
}

template <class Body>
void for_pieces(const Block& block, const Body& body) {
  for (int64_t done = 0; done < block.count; done += kPiece)
    body(block.start + done, std::min(kPiece, block.count - done));
}

// Calls `body` with a value of the gradient's type and one of the 16-bit copy's type.
template <class Body>
void with_types(const Row& row, const Body& body) {
  const auto low = [&](auto grad) {
    if (row.low_type == kBf16) return body(grad, Bf16{});
    if (row.low_type == kHalf) return body(grad, Half{});
    return body(grad, None{});
  };
  if (row.grad_type == kBf16) return low(Bf16{});
  if (row.grad_type == kHalf) return low(Half{});
  return low(0.0f);
}

}  // namespace

// `coef` multiplies every gradient: the inverse loss scale times the clipping factor, negative to let the objective grow.
extern "C" {

void amp_grad_check(const Row* rows, int64_t tensors, float inverse, uint8_t* flags, double* norm_squared, int threads) {
  const std::vector<Block> blocks = blocks_of(rows, tensors);
  std::vector<double> sums(blocks.size());
  std::vector<uint8_t> bad(blocks.size());
  for_blocks(blocks, threads, [&](const Block& block, int64_t i) {
    float sum = 0.0f;
    int odd = 0;
    with_types(rows[block.row], [&](auto grad, auto) {
      for_pieces(block, [&](int64_t start, int64_t count) {
        summary<decltype(grad)>(rows[block.row], start, count, inverse, &sum, &odd);
      });
    });
    sums[i] = sum;
    bad[i] = odd != 0;
  });
  *norm_squared = 0.0;
  for (size_t i = 0; i < blocks.size(); ++i) {  // in one order, whatever the number of threads
    *norm_squared += sums[i];
    flags[blocks[i].row] |= bad[i];
  }
}

void amp_adam_update(const Row* rows, int64_t tensors, const AdamScalars* scalars, float coef, bool decoupled,
                     int threads) {
  for_blocks(blocks_of(rows, tensors), threads, [&](const Block& block, int64_t) {
    const Row& row = rows[block.row];
    with_types(row, [&](auto grad, auto low) {
      for_pieces(block, [&](int64_t start, int64_t count) {
        adam<decltype(grad), decltype(low)>(row, start, count, scalars[block.row], coef, decoupled);
      });
    });
  });
  for (int64_t i = 0; i < tensors; ++i) *at<float>(rows[i].step, 0) += 1.0f;
}

void amp_sgd_update(const Row* rows, int64_t tensors, const SgdScalars* scalars, float coef, bool started, bool nesterov,
                    int threads) {
  for_blocks(blocks_of(rows, tensors), threads, [&](const Block& block, int64_t) {
    const Row& row = rows[block.row];
    with_types(row, [&](auto grad, auto low) {
      for_pieces(block, [&](int64_t start, int64_t count) {
        sgd<decltype(grad), decltype(low)>(row, start, count, *scalars, coef, started, nesterov);
      });
    });
  });
}

}  // extern "C"
