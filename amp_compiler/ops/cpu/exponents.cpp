// Counts of the binary exponents of a tensor's elements.

#include <limits>

#include "types.h"

namespace {

using namespace amp;

constexpr int kBins = 280, kLowest = -149, kZero = 277, kInfinite = 278, kNan = 279;

// Vectors as wide as the processor's: what is wider, compilers compare byte by byte.
#if defined(__AVX512BW__)
constexpr int kLanes = 64;
#elif defined(__AVX2__)
constexpr int kLanes = 32;
#else
constexpr int kLanes = 16;
#endif
constexpr int kAtOnce = 4, kMostBins = 48;
constexpr int64_t kBlock = 64 * kLanes;  // so that each lane counts to 64
typedef uint8_t Lanes __attribute__((vector_size(kLanes)));

inline int64_t sum_of(const Lanes& lanes) {
  constexpr uint64_t kEven = 0x00ff00ff00ff00ffu;
  uint64_t words[kLanes / 8], sums = 0;
  std::memcpy(words, &lanes, sizeof words);
  for (const uint64_t word : words) sums += (word & kEven) + ((word >> 8) & kEven);
  return static_cast<int64_t>((sums * 0x0001000100010001u) >> 48);
}

// How often each of the bytes from `from` on occurs, `kAtOnce` of them; `count` is a multiple of `kLanes`. Meanwhile as
// many bytes are fetched from `ahead` on, where the processor would only begin when they are read.
inline void occurrences(const uint8_t* bytes, int64_t count, int from, int64_t* found, const uint8_t* ahead) {
  Lanes seen[kAtOnce] = {}, wanted[kAtOnce];
  for (int k = 0; k < kAtOnce; ++k) wanted[k] = Lanes{} + static_cast<uint8_t>(from + k);
  for (int64_t i = 0; i < count; i += kLanes) {
    Lanes given;
    std::memcpy(&given, bytes + i, sizeof given);
    __builtin_prefetch(ahead + i);
    for (int k = 0; k < kAtOnce; ++k) {
#ifdef __AVX512BW__
      seen[k] = given == wanted[k] ? seen[k] + 1 : seen[k];  // one addition under a mask
#else
      seen[k] -= reinterpret_cast<Lanes>(given == wanted[k]);
#endif
    }
  }
  for (int k = 0; k < kAtOnce; ++k) found[k] = sum_of(seen[k]);
}

// The eight bits of an exponent that FP32 and BF16 have. FP16 is widened, where its subnormal numbers have one of their
// own.
template <class Word>
void exponents(const Word* __restrict values, int64_t count, uint8_t* __restrict bytes) {
  constexpr int kBits = 8 * sizeof(Word);
  for (int64_t i = 0; i < count; ++i)
    bytes[i] = static_cast<uint8_t>(static_cast<Word>(values[i] << 1) >> (kBits - 8));
}

inline void exponents(const Half* values, int64_t count, uint8_t* bytes) {
  constexpr int64_t kTogether = 512;
  float wide[kTogether];
  uint32_t words[kTogether];
  for (int64_t i = 0; i < count; i += kTogether) {
    const int64_t some = std::min(kTogether, count - i);
    widen(values + i, wide, some, 1.0f);
    std::memcpy(words, wide, sizeof(float) * some);
    exponents(words, some, bytes + i);
  }
}

// Counts by the bits of an exponent. Those of a block lie close together: each is looked for in all of the block.
struct Counter {
  int64_t found[256] = {};  // 0 and 255 stay empty
  int64_t zeros = 0, infinite = 0, nan = 0;
  int64_t small[23] = {};  // subnormal numbers by their first bit in FP32

  void count(const uint32_t* values, int64_t count) { count_words<23>(values, values, count); }
  void count(const uint16_t* values, int64_t count) { count_words<7>(values, values, count); }
  void count(const Half* values, int64_t count) {
    count_words<10>(values, reinterpret_cast<const uint16_t*>(values), count);
  }

  // Counts `count` bytes, at most kBlock, for which there is room up to a multiple of kLanes; what is counted after them
  // lies at `next`. Returns how many are 0 or 255, which are not counted.
  int64_t count_bytes(uint8_t* bytes, int64_t count, const void* next) {
    const uint8_t* ahead = static_cast<const uint8_t*>(next);
    const int64_t whole = (count + kLanes - 1) / kLanes * kLanes;
    std::memset(bytes + count, 0, whole - count);
    uint8_t least = 255, most = 0;
    for (int64_t i = 0; i < whole; ++i) {
      const uint8_t below = static_cast<uint8_t>(bytes[i] - 1), above = static_cast<uint8_t>(bytes[i] + 1);
      least = below < least ? below : least;  // of 0 that is 255
      most = above > most ? above : most;     // of 255 that is 0
    }
    const int first = least + 1, last = most - 1;
    if (last - first >= kMostBins) return count - count_all_bytes(bytes, whole);
    int64_t rest = count;
    for (int at = first; at <= last; at += kAtOnce) {
      int64_t here[kAtOnce];
      occurrences(bytes, whole, at, here, ahead);
      ahead += whole;
      for (int k = 0; k < kAtOnce && at + k <= last; ++k) {
        found[at + k] += here[k];
        rest -= here[k];
      }
    }
    return rest;
  }

  void add_to(int64_t* counts) const {
    counts[kZero] += zeros;
    counts[kInfinite] += infinite;
    counts[kNan] += nan;
    for (int e = 1; e < 255; ++e) counts[e - 127 - kLowest] += found[e];
    for (int bit = 0; bit < 23; ++bit) counts[bit] += small[bit];
  }

 private:
  // `words` are the values as they lie in memory, with a mantissa of so many bits.
  template <int kMantissa, class Value, class Word>
  void count_words(const Value* values, const Word* words, int64_t count) {
    constexpr Word kInf = static_cast<Word>(-(int64_t{2} << kMantissa));
    uint8_t bytes[kBlock];
    exponents(values, count, bytes);
    const int64_t rest = count_bytes(bytes, count, words + count);
    if (rest == 0) return;
    Word zero = 0, inf = 0, beyond = 0;  // as wide as a word, so that the compiler counts many at once
    for (int64_t i = 0; i < count; ++i) {
      const Word shifted = static_cast<Word>(words[i] << 1);  // without the sign
      zero += shifted == 0;
      inf += shifted == kInf;
      beyond += shifted > kInf;
    }
    zeros += zero;
    infinite += inf;
    nan += beyond;
    if (rest > zero + inf + beyond) count_small<kMantissa>(words, count);
  }

  template <int kMantissa, class Word>
  void count_small(const Word* words, int64_t count) {
    constexpr Word kMost = static_cast<Word>((Word{1} << kMantissa) - 1);
    for (int64_t i = 0; i < count; ++i) {
      const Word mantissa = words[i] & kMost;
      if (static_cast<Word>(words[i] << 1) >> 1 == mantissa && mantissa != 0)
        ++small[31 - __builtin_clz(static_cast<uint32_t>(mantissa) << (23 - kMantissa))];
    }
  }

  // Several of each, so that equal neighbours do not wait for each other. Returns how many were counted.
  int64_t count_all_bytes(const uint8_t* bytes, int64_t count) {
    uint32_t copies[4][256] = {};
    for (int64_t i = 0; i < count; i += 4)
      for (int copy = 0; copy < 4; ++copy) ++copies[copy][bytes[i + copy]];
    int64_t counted = 0;
    for (int e = 1; e < 255; ++e) {
      const int64_t here = int64_t{copies[0][e]} + copies[1][e] + copies[2][e] + copies[3][e];
      found[e] += here;
      counted += here;
    }
    return counted;
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

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The bits of a number that is no NaN, rounded to BF16 as `store` does it.
inline uint32_t rounded_to_bf16(uint32_t bits) { return (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u; }

// Neighbouring updates, few enough that they stay in the nearest cache.
struct Updates {
  static constexpr int64_t kCount = 256;

  const float* before;
  float change[kCount];
  int64_t made;

  Updates(const float* __restrict before, const float* __restrict after) : before(before) {
    int unmade = 0;
    for (int64_t i = 0; i < kCount; ++i) {
      change[i] = after[i] - before[i];
      unmade += change[i] == 0.0f;
    }
    made = kCount - unmade;
  }

  // The bits of the exponents of |change| / |before|, 0 for zero. Returns whether all are in `bytes`: where a number is
  // not finite or not normal, a division has to tell. In binary, the exponent of a quotient is what a difference of the
  // numbers' bits has in its place: a mantissa that is the smaller one borrows from it, and rounding never carries.
  bool exponents(uint8_t* __restrict bytes) const {
    constexpr uint32_t kOne = 0x3f800000u, kNormal = 0x00800000u, kInf = 0x7f800000u;
    uint32_t least = kOne, most = kOne;
    for (int64_t i = 0; i < kCount; ++i) {
      const uint32_t above = bits_of(change[i]) & 0x7fffffffu, below = bits_of(before[i]) & 0x7fffffffu;
      const uint32_t none = -static_cast<uint32_t>(above == 0), nothing = -static_cast<uint32_t>(below == 0);
      const uint32_t one = above | (none & kOne), other = below | (nothing & kOne);
      least = std::min(least, std::min(one, other));
      most = std::max(most, std::max(one, other));
      const int32_t exponent = static_cast<int32_t>(one - other) >> 23;
      bytes[i] = static_cast<uint8_t>((exponent + 127) & ~static_cast<int32_t>(none | nothing));
    }
    return least >= kNormal && most < kInf && most - least < 126 * kNormal;
  }

  void ratios(uint32_t* words) const {
    for (int64_t i = 0; i < kCount; ++i)
      words[i] = bits_of(before[i] == 0.0f ? 0.0f : std::fabs(change[i]) / std::fabs(before[i]));
  }

  // How many of the changes that are not zero leave a weight as it was; `plain` where `exponents` found nothing else.
  int64_t lost_bf16(bool plain) const {
    int same = 0;
    if (plain) {  // no NaN to be kept one
      for (int64_t i = 0; i < kCount; ++i) {
        const uint32_t low = rounded_to_bf16(bits_of(before[i]));
        same += (low == rounded_to_bf16(bits_of(float_of(low) + change[i]))) & (change[i] != 0.0f);
      }
      return same;
    }
    for (int64_t i = 0; i < kCount; ++i) {
      Bf16 low, moved;
      store(before[i], &low);
      store(load(low) + change[i], &moved);
      same += (low.bits == moved.bits) & (change[i] != 0.0f);
    }
    return same;
  }

#ifdef __AVX512F__
  int64_t lost_half() const {
    int64_t same = 0;
    for (int64_t i = 0; i < kCount; i += 16) {
      const __m512 made = _mm512_loadu_ps(change + i);
      const __m256i low = _mm512_cvtps_ph(_mm512_loadu_ps(before + i), _MM_FROUND_TO_NEAREST_INT);
      const __m256i moved = _mm512_cvtps_ph(_mm512_add_ps(_mm512_cvtph_ps(low), made), _MM_FROUND_TO_NEAREST_INT);
      const __m512i other = _mm512_cvtepu16_epi32(_mm256_xor_si256(low, moved));
      const __mmask16 changes = _mm512_cmp_ps_mask(made, _mm512_setzero_ps(), _CMP_NEQ_UQ);
      same += __builtin_popcount(_mm512_mask_testn_epi32_mask(changes, other, other));
    }
    return same;
  }
#else
  int64_t lost_half() const {  // in loops of their own, as types.h converts FP16
    Half low[kCount], moved[kCount];
    float wide[kCount];
    uint16_t one[kCount], other[kCount];
    narrow(before, low, kCount);
    widen(low, wide, kCount, 1.0f);
    for (int64_t i = 0; i < kCount; ++i)  // where nothing changes a NaN, which is none before: it is not counted
      wide[i] = change[i] == 0.0f ? std::numeric_limits<float>::quiet_NaN() : wide[i] + change[i];
    narrow(wide, moved, kCount);
    std::memcpy(one, low, sizeof one);
    std::memcpy(other, moved, sizeof one);
    uint16_t same = 0;
    for (int64_t i = 0; i < kCount; ++i) same += one[i] == other[i];
    return same;
  }
#endif
};

// Fetches the updates behind those that are being counted, which the processor is too late to foresee.
inline void prefetch(const float* before, const float* after) {
  for (int64_t i = 0; i < Updates::kCount; i += 16) {
    __builtin_prefetch(before + i);
    __builtin_prefetch(after + i);
  }
}

}  // namespace

extern "C" {

// Copies what is not read soon, past the caches: without reading the memory that is overwritten.
void amp_copy_past_caches(void* to, const void* from, int64_t bytes) {
#ifdef __AVX512F__
  char* target = static_cast<char*>(to);
  const char* source = static_cast<const char*>(from);
  const int64_t first = std::min<int64_t>(bytes, -reinterpret_cast<intptr_t>(target) & 63);
  std::memcpy(target, source, first);
  int64_t at = first;
  for (; at + 64 <= bytes; at += 64)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + at), _mm512_loadu_si512(source + at));
  std::memcpy(target + at, source + at, bytes - at);
  _mm_sfence();
#else
  std::memcpy(to, from, bytes);
#endif
}

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
  constexpr int64_t kCount = Updates::kCount;
  int64_t made = 0, half = 0, bf16 = 0;
#pragma omp parallel num_threads(size < (1 << 15) ? 1 : threads) reduction(+ : made, half, bf16)
  {
    Counter mine;
    uint8_t bytes[kBlock];
    int64_t filled = 0;
    const auto take = [&](const float* one, const float* other) {
      const Updates some(one, other);
      const bool plain = some.exponents(bytes + filled);
      if (plain) {
        filled += kCount;
      } else {
        uint32_t words[kCount];
        some.ratios(words);
        mine.count(words, kCount);
      }
      made += some.made;
      half += some.lost_half();
      bf16 += some.lost_bf16(plain);
    };
#pragma omp for schedule(static) nowait
    for (int64_t from = 0; from < size; from += kBlock) {
      const int64_t end = std::min(size, from + kBlock), whole = from + (end - from) / kCount * kCount;
      for (int64_t at = from; at < whole; at += kCount) {
        prefetch(before + at + 2 * kCount, after + at + 2 * kCount);
        take(before + at, after + at);
      }
      if (whole < end) {  // made up with zeros that do not change
        float last[2][kCount] = {};
        std::copy(before + whole, before + end, last[0]);
        std::copy(after + whole, after + end, last[1]);
        take(last[0], last[1]);
        mine.zeros -= kCount - (end - whole);
      }
      mine.zeros += mine.count_bytes(bytes, filled, after + end);
      filled = 0;
    }
#pragma omp critical
    mine.add_to(counts);
  }
  found[0] += made;
  found[1] += half;
  found[2] += bf16;
}
}
