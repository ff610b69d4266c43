// Counts of the binary exponents of a tensor's elements.

#include <vector>

#include "types.h"

namespace {

using namespace amp;

constexpr int kBins = 280, kLowest = -149, kZero = 277, kInfinite = 278, kNan = 279;

constexpr int64_t kBlock = 1 << 12;

// A number is a sign, `Bits` of an exponent and a mantissa. The exponent of a normal number is what stands there less
// `Bias`.
template <class Word, int Bits, int Mantissa, int Bias>
struct Counter {
  static constexpr int kExponents = 1 << Bits, kPlaces = 2 * kExponents, kCopies = 8;
  // By exponent, and whether the mantissa is zero; several of each, so that equal neighbours do not wait for each other.
  std::vector<int64_t> found = std::vector<int64_t>(kCopies * kPlaces);
  int64_t small[Mantissa] = {};  // subnormal numbers by their first bit

  static uint32_t mantissa(Word word) { return word & ((1u << Mantissa) - 1); }
  static uint32_t place(Word word) {
    return ((uint32_t{word} >> Mantissa) & (kExponents - 1)) << 1 | (mantissa(word) != 0);
  }

  void count(const Word* values, int64_t count) {  // at most kBlock
    uint16_t places[kBlock];
    for (int64_t i = 0; i < count; ++i) places[i] = static_cast<uint16_t>(place(values[i]));
    int64_t* const copies = found.data();
    int64_t i = 0;
    for (; i + kCopies <= count; i += kCopies)
      for (int copy = 0; copy < kCopies; ++copy) ++copies[copy * kPlaces + places[i + copy]];
    for (; i < count; ++i) ++copies[places[i]];
    bool any = false;
    for (int64_t k = 0; k < count; ++k) any |= places[k] == 1;
    if (!any) return;
    for (int64_t k = 0; k < count; ++k)
      if (places[k] == 1) ++small[31 - __builtin_clz(mantissa(values[k]))];
  }

  void add_to(int64_t* counts) const {
    for (int copy = 0; copy < kCopies; ++copy) {
      const int64_t* from = found.data() + copy * kPlaces;
      counts[kZero] += from[0];
      for (int e = 1; e < kExponents - 1; ++e) counts[e - Bias - kLowest] += from[2 * e] + from[2 * e + 1];
      counts[kInfinite] += from[kPlaces - 2];
      counts[kNan] += from[kPlaces - 1];
    }
    for (int bit = 0; bit < Mantissa; ++bit) counts[bit + 1 - Bias - Mantissa - kLowest] += small[bit];
  }
};

using Float = Counter<uint32_t, 8, 23, 127>;

template <class Kind, class Word>
void count_all(const Word* values, int64_t size, int64_t* counts, int threads) {
#pragma omp parallel num_threads(threads)
  {
    Kind mine;
#pragma omp for schedule(static) nowait
    for (int64_t from = 0; from < size; from += kBlock) mine.count(values + from, std::min(kBlock, size - from));
#pragma omp critical
    mine.add_to(counts);
  }
}

// How many of the changes that are not zero leave a weight of 16 bits as it was.
template <class L>
int64_t lost(const float* before, const float* change, int64_t count) {
  L low[kBlock], moved[kBlock];
  float wide[kBlock];
  narrow(before, low, count);
  widen(low, wide, count, 1.0f);
  for (int64_t i = 0; i < count; ++i) wide[i] += change[i];
  narrow(wide, moved, count);
  int64_t same = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint16_t one, other;
    std::memcpy(&one, low + i, sizeof one);
    std::memcpy(&other, moved + i, sizeof other);
    same += (one == other) & (change[i] != 0.0f);
  }
  return same;
}

}  // namespace

extern "C" {

// Of each tensor an address, a type and a size; `counts` has a row for each.
void amp_count_exponents(const int64_t (*tensors)[3], int64_t tensor_count, int64_t* counts, int threads) {
  for (int64_t t = 0; t < tensor_count; ++t, counts += kBins) {
    const auto [address, type, size] = tensors[t];
    const void* values = reinterpret_cast<const void*>(address);
    const int used = size < (1 << 15) ? 1 : threads;
    if (type == kFloat)
      count_all<Float>(static_cast<const uint32_t*>(values), size, counts, used);
    else if (type == kBf16)
      count_all<Counter<uint16_t, 8, 7, 127>>(static_cast<const uint16_t*>(values), size, counts, used);
    else
      count_all<Counter<uint16_t, 5, 10, 15>>(static_cast<const uint16_t*>(values), size, counts, used);
  }
}

// `found`: how many weights were changed, and how many of these changes are lost in FP16 and in BF16.
void amp_count_update(const float* before, const float* after, int64_t size, int64_t* counts, int64_t* found,
                      int threads) {
  int64_t made = 0, half = 0, bf16 = 0;
#pragma omp parallel num_threads(size < (1 << 15) ? 1 : threads) reduction(+ : made, half, bf16)
  {
    Float mine;
#pragma omp for schedule(static) nowait
    for (int64_t from = 0; from < size; from += kBlock) {
      const int64_t count = std::min(kBlock, size - from);
      float change[kBlock], ratio[kBlock];
      for (int64_t i = 0; i < count; ++i) change[i] = after[from + i] - before[from + i];
      for (int64_t i = 0; i < count; ++i) {
        const float weight = before[from + i];
        ratio[i] = weight == 0.0f ? 0.0f : std::fabs(change[i]) / std::fabs(weight);
        made += change[i] != 0.0f;
      }
      uint32_t words[kBlock];
      std::memcpy(words, ratio, sizeof(float) * count);
      mine.count(words, count);
      half += lost<Half>(before + from, change, count);
      bf16 += lost<Bf16>(before + from, change, count);
    }
#pragma omp critical
    mine.add_to(counts);
  }
  found[0] += made;
  found[1] += half;
  found[2] += bf16;
}
}
