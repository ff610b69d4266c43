// The gradient check and the optimizer updates on a CPU: one pass over all tensors of a group, at memory bandwidth.
// The arithmetic and its order are those of ops/update/, bit for bit: fused multiply-adds stand where they
// are written and nowhere else (-ffp-contract=off).

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "chunks.h"
#include "product.h"
#include "types.h"

namespace {

using namespace amp;

inline float sign(float x) { return static_cast<float>(x > 0.0f) - static_cast<float>(x < 0.0f); }

// What a step is made with, in the order of the classes of these names in Python, and the flags of an operator, behind
// which stands whether the first step was made before.
struct AdamNumbers {
  float shrink, l2, l1, weight1, beta2, weight2, eps, root, neg_step;
};
struct SgdNumbers {
  float neg_lr, momentum, weight, l2, l1;
};
enum AdamFlags { kAmsgrad, kAdamMaximize, kDecoupled };
enum SgdFlags { kNesterov, kSgdMaximize, kSgdStarted };

template <class T>
T* at(int64_t address, int64_t start) {
  return address == 0 ? nullptr : reinterpret_cast<T*>(address) + start;
}

// What follows works on chunks that stay in the nearest cache: loops are simple enough for any compiler to vectorise,
// and what is the same for all elements is decided outside of them.

void decay(float* __restrict grads, const float* __restrict weights, int64_t count, float l1, float l2) {
  if (l1 != 0.0f)
    for (int64_t i = 0; i < count; ++i) grads[i] = grads[i] + sign(weights[i]) * l1;
  if (l2 != 0.0f)
    for (int64_t i = 0; i < count; ++i) grads[i] = __builtin_fmaf(weights[i], l2, grads[i]);
}

// Both forms of torch.lerp, and the maximum of the second moments, are chosen outside of the loop.
template <bool kNear, bool kLargest, class L>
int adam_loop(const float* __restrict grads, const L* __restrict low_weights, float* __restrict weights,
              float* __restrict firsts, float* __restrict seconds, float* __restrict largests, int64_t count,
              const AdamNumbers& s, float shrink) {
  const float weight1 = kNear ? s.weight1 : s.weight1 - 1.0f, beta2 = s.beta2, weight2 = s.weight2;
  const float eps = s.eps, root = s.root, neg_step = s.neg_step;
  int stale = 0;
#pragma omp simd reduction(| : stale)
  for (int64_t i = 0; i < count; ++i) {
    const float grad = grads[i];
    stale |= strays(weights[i], low_weights[i]);
    const float first = __builtin_fmaf(weight1, grad - firsts[i], kNear ? firsts[i] : grad);
    const float second = __builtin_fmaf(grad * weight2, grad, seconds[i] * beta2);
    float under = second;
    if (kLargest) {  // as torch.maximum: a NaN wins
      const float largest = largests[i];
      under = (largest > second || largest != largest) ? largest : second;
      largests[i] = under;
    }
    firsts[i] = first;
    seconds[i] = second;
    weights[i] = weights[i] * shrink + (first * neg_step) / (__builtin_sqrtf(under) / root + eps);
  }
  return stale;
}

template <class G, class L>
int adam(const Row& row, const G* raw, int64_t start, int64_t count, const AdamNumbers& s, float coef,
          bool decoupled) {
  float grads[kChunk];
  float* weights = at<float>(row.weight, start);
  float* largests = at<float>(row.largest, start);
  widen(raw, grads, count, coef);
  decay(grads, weights, count, s.l1, decoupled ? 0.0f : s.l2);
  const bool near = std::fabs(s.weight1) < 0.5f;
  const auto loop = largests == nullptr ? (near ? adam_loop<true, false, L> : adam_loop<false, false, L>)
                                        : (near ? adam_loop<true, true, L> : adam_loop<false, true, L>);
  L* low_weights = at<L>(row.low, start);
  const int stale = loop(grads, low_weights, weights, at<float>(row.first, start), at<float>(row.second, start),
                         largests, count, s, decoupled ? s.shrink : 1.0f);
  if (low_weights != nullptr) narrow(weights, low_weights, count);
  return stale;
}

template <class G, class L>
int sgd(const Row& row, const G* raw, int64_t start, int64_t count, const SgdNumbers& s, float coef, bool started,
         bool nesterov) {
  float buffer[kChunk];
  float* __restrict grads = buffer;
  float* __restrict weights = at<float>(row.weight, start);
  float* __restrict momenta = at<float>(row.first, start);
  widen(raw, grads, count, coef);
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
  L* __restrict low_weights = at<L>(row.low, start);
  int stale = 0;
#pragma omp simd reduction(| : stale)
  for (int64_t i = 0; i < count; ++i) {
    stale |= strays(weights[i], low_weights[i]);
    weights[i] = __builtin_fmaf(grads[i], s.neg_lr, weights[i]);
  }
  if (low_weights != nullptr) narrow(weights, low_weights, count);
  return stale;
}

template <class G>
void summary(const G* grads, int64_t count, float factor, Finding* finding) {
  float total = 0.0f;
  int odd = 0;
#pragma omp simd reduction(+ : total) reduction(| : odd)
  for (int64_t i = 0; i < count; ++i) {
    const float grad = load(grads[i]), scaled = grad * factor;
    total += scaled * scaled;
    odd |= static_cast<int>(!(std::fabs(grad) <= 3.402823466e38f));
  }
  finding->sum += total;
  finding->bad |= odd;
}

template <>
void summary<Half>(const Half* grads, int64_t count, float factor, Finding* finding) {
  float wide[kChunk];
  widen(grads, wide, count, 1.0f);
  summary<float>(wide, count, factor, finding);
}

// The squares of gradients that the check has left out because it needed none of their elements.
template <class G>
void count_squares(const Row& row, const G* grads, int64_t count, float coef, Finding* finding) {
  if (row.product != 0 && reinterpret_cast<const Product*>(row.product)->counted == 0)
    summary(grads, count, coef, finding);
}

// Where it is noted that 16-bit copies were not their weights rounded, and whether weights take what these have else.
struct Copies {
  uint8_t* stale;
  bool takes;
};

// Lets weights take what their 16-bit copies have otherwise, because these were written since; whether there is such.
template <class L>
int take(const Row& row, const Chunk& chunk) {
  float* weights = at<float>(row.weight, chunk.start);
  const L* low_weights = at<L>(row.low, chunk.start);
  if (!one_strays(weights, low_weights, chunk.count)) return 0;
  for (int64_t i = 0; i < chunk.count; ++i)
    if (strays(weights[i], low_weights[i])) weights[i] = load(low_weights[i]);
  return 1;
}

// Calls `one(chunk, gradients, low)`, typed, for all chunks, which says whether a copy strays, and raises the step counts
// where there are any. Returns the squares that the check has left out.
template <class One>
double update_all(const Row* rows, int64_t tensors, float coef, const Copies& copies, int threads, const One& one) {
  const auto body = [&](const Chunk& chunk, Finding* finding) {
    const Row& row = rows[chunk.row];
    with_types(chunk.type, row.low_type, [&](auto grad, auto low) {
      const auto* raw = reinterpret_cast<const decltype(grad)*>(chunk.grads);
      if (copies.takes) finding->stale |= take<decltype(low)>(row, chunk);
      finding->stale |= one(chunk, raw, low);
      count_squares(row, raw, chunk.count, coef, finding);
    });
  };
  const Findings findings = for_all(rows, tensors, threads, body);
  for (int64_t i = 0; i < tensors; ++i) {
    if (rows[i].step != 0) *at<float>(rows[i].step, 0) += 1.0f;
    if (findings[i].stale != 0 && copies.stale != nullptr) copies.stale[i] = 1;
  }
  return total(findings);
}

}  // namespace

// `coef` multiplies every gradient: the inverse loss scale times the clipping factor, negative to let the objective
// grow. Squares are summed after that. An update gives the squares that the check has left out.
extern "C" {

int64_t amp_most_inner() { return most_inner(); }

double amp_grad_check(const Row* rows, int64_t tensors, float inverse, uint8_t* flags, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t row = 0; row < tensors; ++row)
    if (rows[row].product != 0) {
      Product& product = *reinterpret_cast<Product*>(rows[row].product);
      product.counted = !surely_finite(product);
    }
  std::vector<Row> checked;
  std::vector<int64_t> places;
  for (int64_t row = 0; row < tensors; ++row) {
    if (rows[row].product != 0 && !reinterpret_cast<const Product*>(rows[row].product)->counted) continue;
    checked.push_back(rows[row]);
    places.push_back(row);
  }
  const int64_t count = static_cast<int64_t>(checked.size());
  const auto check = [&](const Chunk& chunk, Finding* finding) {
    with_types(chunk.type, kNone, [&](auto grad, auto) {
      summary(reinterpret_cast<const decltype(grad)*>(chunk.grads), chunk.count, inverse, finding);
    });
  };
  const Findings findings = for_all(checked.data(), count, threads, check);
  for (int64_t i = 0; i < count; ++i) flags[places[i]] |= static_cast<uint8_t>(findings[i].bad);
  return total(findings);
}

double amp_adam_update(const Row* rows, int64_t tensors, const AdamNumbers* numbers, float coef, const bool* flags,
                       uint8_t* stale, bool takes, int threads) {
  const bool decoupled = flags[kDecoupled];
  return update_all(rows, tensors, coef, {stale, takes}, threads, [&](const Chunk& chunk, const auto* raw, auto low) {
    return adam<std::decay_t<decltype(*raw)>, decltype(low)>(rows[chunk.row], raw, chunk.start, chunk.count,
                                                      numbers[chunk.row], coef, decoupled);
  });
}

double amp_sgd_update(const Row* rows, int64_t tensors, const SgdNumbers* numbers, float coef, const bool* flags,
                      uint8_t* stale, bool takes, int threads) {
  const bool started = flags[kSgdStarted], nesterov = flags[kNesterov];
  return update_all(rows, tensors, coef, {stale, takes}, threads, [&](const Chunk& chunk, const auto* raw, auto low) {
    return sgd<std::decay_t<decltype(*raw)>, decltype(low)>(rows[chunk.row], raw, chunk.start, chunk.count,
                                                     numbers[chunk.row], coef, started, nesterov);
  });
}

}  // extern "C"
