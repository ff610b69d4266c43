// Counts of the binary exponents of a tensor's elements.

#include "types.h"

namespace {

using namespace amp;

constexpr int kBins = 280, kLowest = -149, kZero = 277, kInfinite = 278, kNan = 279;

constexpr int64_t kBlock = 1 << 12;

constexpr int kLanes = 64, kAtOnce = 4, kMostBins = 40;
typedef uint8_t Lanes __attribute__((vector_size(kLanes)));

// How often each of the bytes from `from` on occurs, `kAtOnce` of them; `count` is a multiple of `kLanes`, and at most
// 255 times that.
inline void occurrences(const uint8_t* bytes, int64_t count, int from, int64_t* found) {
  Lanes seen[kAtOnce] = {}, wanted[kAtOnce];
  for (int k = 0; k < kAtOnce; ++k) wanted[k] = Lanes{} + static_cast<uint8_t>(from + k);
  for (int64_t i = 0; i < count; i += kLanes) {
    Lanes given;
    std::memcpy(&given, bytes + i, sizeof given);
    for (int k = 0; k < kAtOnce; ++k) seen[k] -= reinterpret_cast<Lanes>(given == wanted[k]);
  }
  for (int k = 0; k < kAtOnce; ++k) {
    int sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += seen[k][lane];
    found[k] += sum;
  }
}

// Counts by the eight bits of an exponent that FP32 and BF16 have; FP16 is widened, where its subnormal numbers have an
// exponent of their own. A block's exponents lie close together: each is looked for in all of the block at once.
struct Counter {
  int64_t found[256 + kAtOnce] = {};  // by the bits of the exponent; 0 and 255 stay empty
  int64_t zeros = 0, infinite = 0, nan = 0;
  int64_t small[23] = {};  // subnormal numbers by their first bit in FP32

  template <class Word>
  void count(const Word* values, int64_t count) {  // at most kBlock
    constexpr int kMantissa = sizeof(Word) == 4 ? 23 : 7;
    constexpr Word kInf = static_cast<Word>(Word{255} << (kMantissa + 1));
    uint8_t bytes[kBlock];
    // In types as wide as a word, so that the compiler counts many at once.
    Word zero = 0, inf = 0;
    for (int64_t i = 0; i < count; ++i) {
      const Word shifted = static_cast<Word>(values[i] << 1);  // without the sign
      zero += shifted == 0;
      inf += shifted == kInf;
      bytes[i] = static_cast<uint8_t>(shifted >> (kMantissa + 1));
    }
    const int64_t whole = (count + kLanes - 1) / kLanes * kLanes;
    for (int64_t i = count; i < whole; ++i) bytes[i] = 0;
    uint8_t least = 255, most = 0;
    int ends[2] = {};
    for (int64_t i = 0; i < whole; ++i) {
      const uint8_t below = static_cast<uint8_t>(bytes[i] - 1), above = static_cast<uint8_t>(bytes[i] + 1);
      least = below < least ? below : least;  // of 0 that is 255
      most = above > most ? above : most;     // of 255 that is 0
    }
    for (int64_t i = 0; i < whole; ++i) ends[0] += bytes[i] == 0;
    for (int64_t i = 0; i < whole; ++i) ends[1] += bytes[i] == 255;
    const int64_t subnormal = ends[0] - (whole - count) - zero;
    zeros += zero;
    infinite += inf;
    nan += ends[1] - inf;
    if (subnormal) count_small(values, count, 23 - kMantissa);
    const int first = least + 1, last = most - 1;
    if (last - first < kMostBins) {
      for (int at = first; at <= last; at += kAtOnce) {
        int64_t here[kAtOnce] = {};
        occurrences(bytes, whole, at, here);
        for (int k = 0; k < kAtOnce && at + k <= last; ++k) found[at + k] += here[k];
      }
    } else {
      count_bytes(bytes, whole);
    }
  }

  void count(const Half* values, int64_t count) {
    float wide[kBlock];
    uint32_t words[kBlock];
    widen(values, wide, count, 1.0f);
    std::memcpy(words, wide, sizeof(float) * count);
    this->count(words, count);
  }

  template <class Word>
  void count_small(const Word* values, int64_t count, int shift) {
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t mantissa = static_cast<uint32_t>(values[i]) & ((1u << (23 - shift)) - 1);
      const bool is_small = static_cast<Word>(values[i] << 1) >> (24 - shift) == 0 && mantissa != 0;
      if (is_small) ++small[31 - __builtin_clz(mantissa << shift)];
    }
  }

  // Several of each, so that equal neighbours do not wait for each other.
  void count_bytes(const uint8_t* bytes, int64_t count) {
    uint32_t copies[4][256] = {};
    for (int64_t i = 0; i < count; i += 4)
      for (int copy = 0; copy < 4; ++copy) ++copies[copy][bytes[i + copy]];
    for (int e = 1; e < 255; ++e) found[e] += copies[0][e] + copies[1][e] + copies[2][e] + copies[3][e];
  }

  void add_to(int64_t* counts) const {
    counts[kZero] += zeros;
    counts[kInfinite] += infinite;
    counts[kNan] += nan;
    for (int e = 1; e < 255; ++e) counts[e - 127 - kLowest] += found[e];
    for (int bit = 0; bit < 23; ++bit) counts[bit] += small[bit];
  }
};

template <class Word>
void count_all(const Word* values, int64_t size, int64_t* counts, int threads) {
#pragma omp parallel num_threads(threads)
  {
    Counter mine;
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
      count_all(static_cast<const uint32_t*>(values), size, counts, used);
    else if (type == kBf16)
      count_all(static_cast<const uint16_t*>(values), size, counts, used);
    else
      count_all(static_cast<const Half*>(values), size, counts, used);
  }
}

// `found`: how many weights were changed, and how many of these changes are lost in FP16 and in BF16.
void amp_count_update(const float* before, const float* after, int64_t size, int64_t* counts, int64_t* found,
                      int threads) {
  int64_t made = 0, half = 0, bf16 = 0;
#pragma omp parallel num_threads(size < (1 << 15) ? 1 : threads) reduction(+ : made, half, bf16)
  {
    Counter mine;
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
