// Counts of the binary exponents of numbers, and of what an update does to a weight. They are counted where they are in
// the nearest cache: by exponents.cpp behind a step, by update.cpp within one.

#pragma once

#include <limits>

#include "types.h"

namespace amp {

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
constexpr int64_t kCounted = 64 * kLanes;  // bytes that are counted together, so that each lane counts to 64
typedef uint8_t Lanes __attribute__((vector_size(kLanes)));

inline int64_t sum_of(const Lanes& lanes) {
#ifdef __AVX512BW__
  return _mm512_reduce_add_epi64(_mm512_sad_epu8(reinterpret_cast<__m512i>(lanes), _mm512_setzero_si512()));
#else
  constexpr uint64_t kEven = 0x00ff00ff00ff00ffu;
  uint64_t words[kLanes / 8], sums = 0;
  std::memcpy(words, &lanes, sizeof words);
  for (const uint64_t word : words) sums += (word & kEven) + ((word >> 8) & kEven);
  return static_cast<int64_t>((sums * 0x0001000100010001u) >> 48);
#endif
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

inline uint32_t word_of(float value) { return bits_of(value); }
inline uint16_t word_of(Bf16 value) { return value.bits; }
inline uint16_t word_of(Half value) {
  uint16_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

template <class Value>
constexpr int kMantissa = 23;  // bits
template <>
inline constexpr int kMantissa<Bf16> = 7;
template <>
inline constexpr int kMantissa<Half> = 10;

// The eight bits of an exponent that FP32 and BF16 have. FP16 is widened, where its subnormal numbers have one of their
// own.
template <class Value>
void exponents(const Value* __restrict values, int64_t count, uint8_t* __restrict bytes) {
  using Word = decltype(word_of(Value{}));
  for (int64_t i = 0; i < count; ++i)
    bytes[i] = static_cast<uint8_t>(static_cast<Word>(word_of(values[i]) << 1) >> (8 * sizeof(Word) - 8));
}

template <>
inline void exponents<Half>(const Half* __restrict values, int64_t count, uint8_t* __restrict bytes) {
  constexpr int64_t kTogether = 512;
  float wide[kTogether];
  for (int64_t i = 0; i < count; i += kTogether) {
    const int64_t some = std::min(kTogether, count - i);
    widen(values + i, wide, some, 1.0f);
    exponents(wide, some, bytes + i);
  }
}

// Counts by the bits of an exponent. Those of a block lie close together: each is looked for in all of the block.
struct Counter {
  int64_t found[256] = {};  // 0 and 255 stay empty
  int64_t zeros = 0, infinite = 0, nan = 0;
  int64_t small[23] = {};  // subnormal numbers by their first bit in FP32

  // Counts at most kCounted values.
  template <class Value>
  void count(const Value* values, int64_t count) {
    uint8_t bytes[kCounted];
    exponents(values, count, bytes);
    if (const int64_t rest = count_bytes(bytes, count, values + count)) count_rest(values, count, rest);
  }

  // Counts `count` bytes, at most kCounted, for which there is room up to a multiple of kLanes; what is counted after
  // them lies at `next`. Returns how many are 0 or 255, which are not counted.
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

  // Counts those values that are neither normal nor finite, `rest` of them.
  template <class Value>
  void count_rest(const Value* values, int64_t count, int64_t rest) {
    using Word = decltype(word_of(Value{}));
    constexpr Word kInf = static_cast<Word>(-(int64_t{2} << kMantissa<Value>));
    Word zero = 0, inf = 0, beyond = 0;  // as wide as a word, so that the compiler counts many at once
    for (int64_t i = 0; i < count; ++i) {
      const Word shifted = static_cast<Word>(word_of(values[i]) << 1);  // without the sign
      zero += shifted == 0;
      inf += shifted == kInf;
      beyond += shifted > kInf;
    }
    zeros += zero;
    infinite += inf;
    nan += beyond;
    if (rest > zero + inf + beyond) count_small(values, count);
  }

  void add_to(int64_t* counts) const {
    counts[kZero] += zeros;
    counts[kInfinite] += infinite;
    counts[kNan] += nan;
    for (int e = 1; e < 255; ++e) counts[e - 127 - kLowest] += found[e];
    for (int bit = 0; bit < 23; ++bit) counts[bit] += small[bit];
  }

 private:
  template <class Value>
  void count_small(const Value* values, int64_t count) {
    using Word = decltype(word_of(Value{}));
    constexpr Word kMost = static_cast<Word>((Word{1} << kMantissa<Value>)-1);
    for (int64_t i = 0; i < count; ++i) {
      const Word word = word_of(values[i]), mantissa = word & kMost;
      if (static_cast<Word>(word << 1) >> 1 == mantissa && mantissa != 0)
        ++small[31 - __builtin_clz(static_cast<uint32_t>(mantissa) << (23 - kMantissa<Value>))];
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

  void ratios(float* made) const {
    for (int64_t i = 0; i < kCount; ++i)
      made[i] = before[i] == 0.0f ? 0.0f : std::fabs(change[i]) / std::fabs(before[i]);
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

// What a few updates come to.
struct Found {
  int64_t made = 0, half = 0, bf16 = 0;  // changed elements, and those of them whose changes are lost in either type
};

#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)

inline __m512i rounded_to_bf16(__m512i bits) {
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  return _mm512_and_si512(sum, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
}

// `Updates` of `kCount` elements at once, as long as all numbers are normal. Returns whether they were; else nothing is
// found.
inline bool plain_updates(const float* before, const float* after, uint8_t* bytes, Found* found) {
  const __m512i sign = _mm512_set1_epi32(0x7fffffff), one = _mm512_set1_epi32(1), bias = _mm512_set1_epi32(127);
  __m512i made = _mm512_setzero_si512(), half = made, bf16 = made;
  __m512i least = _mm512_set1_epi32(0x3f800000), most = least;
#pragma GCC unroll 4
  for (int64_t i = 0; i < Updates::kCount; i += 16) {
    const __m512 old = _mm512_loadu_ps(before + i), change = _mm512_sub_ps(_mm512_loadu_ps(after + i), old);
    const __m512i above = _mm512_and_si512(_mm512_castps_si512(change), sign);
    const __m512i below = _mm512_and_si512(_mm512_castps_si512(old), sign);
    const __mmask16 some = _mm512_test_epi32_mask(above, above), there = _mm512_test_epi32_mask(below, below);
    least = _mm512_mask_min_epu32(least, some, least, above);
    least = _mm512_mask_min_epu32(least, there, least, below);
    most = _mm512_max_epu32(most, _mm512_max_epu32(above, below));
    const __m512i exponent = _mm512_add_epi32(_mm512_srai_epi32(_mm512_sub_epi32(above, below), 23), bias);
    const __m128i narrow = _mm512_maskz_cvtepi32_epi8(_kand_mask16(some, there), exponent);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + i), narrow);
    made = _mm512_mask_add_epi32(made, some, made, one);

    const __m512i low = rounded_to_bf16(_mm512_castps_si512(old));
    const __m512i moved =
        rounded_to_bf16(_mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(low), change)));
    bf16 = _mm512_mask_add_epi32(bf16, _mm512_mask_cmpeq_epi32_mask(some, low, moved), bf16, one);

    const __m256i less = _mm512_cvtps_ph(old, _MM_FROUND_TO_NEAREST_INT);
    const __m256i after_it =
        _mm512_cvtps_ph(_mm512_add_ps(_mm512_cvtph_ps(less), change), _MM_FROUND_TO_NEAREST_INT);
    half = _mm512_mask_add_epi32(half, _mm256_mask_cmpeq_epi16_mask(some, less, after_it), half, one);
  }
  constexpr uint32_t kNormal = 0x00800000u, kInf = 0x7f800000u;
  const uint32_t low = _mm512_reduce_min_epu32(least), high = _mm512_reduce_max_epu32(most);
  if (low < kNormal || high >= kInf || high - low >= 126 * kNormal) return false;
  *found = {_mm512_reduce_add_epi32(made), _mm512_reduce_add_epi32(half), _mm512_reduce_add_epi32(bf16)};
  return true;
}

#else

inline bool plain_updates(const float*, const float*, uint8_t*, Found*) { return false; }

#endif

// Counts what is done to a weight: the exponents of its gradient, those of `|change| / |before|`, how many elements were
// changed, and how many of these changes are lost in FP16 and in BF16.
class UpdateCounter {
 public:
  // At most kCounted elements of the gradient.
  template <class Value>
  void gradient(const Value* values, int64_t count) {
    if (given_ + count > kCounted) count_given();
    uint8_t* bytes = given_bytes_ + given_;
    exponents(values, count, bytes);
    if (const int64_t rest = rest_of(bytes, count)) gradients_.count_rest(values, count, rest);
    given_ += count;
  }

  // Any number of elements, as they were and as they are.
  void update(const float* before, const float* after, int64_t count) {
    constexpr int64_t kCount = Updates::kCount;
    int64_t at = 0;
    for (; at + kCount <= count; at += kCount) take(before + at, after + at);
    if (at == count) return;
    float last[2][kCount] = {};  // made up with zeros that do not change
    std::copy(before + at, before + count, last[0]);
    std::copy(after + at, after + count, last[1]);
    take(last[0], last[1]);
    ratios_.zeros -= kCount - (count - at);
  }

  // Adds the counts, of `kBins` places each, and in `found` the numbers of changes. It is used no more after that.
  void add_to(int64_t* gradients, int64_t* ratios, int64_t* found) {
    count_given();
    count_taken();
    if (gradients != nullptr) gradients_.add_to(gradients);
    ratios_.add_to(ratios);
    found[0] += made_;
    found[1] += half_;
    found[2] += bf16_;
  }

 private:
  void take(const float* before, const float* after) {
    constexpr int64_t kCount = Updates::kCount;
    if (taken_ + kCount > kCounted) count_taken();
    Found found;
    bool plain = plain_updates(before, after, taken_bytes_ + taken_, &found);
    if (!plain) {
      const Updates some(before, after);
      plain = some.exponents(taken_bytes_ + taken_);
      found = {some.made, some.lost_half(), some.lost_bf16(plain)};
      if (!plain) {
        float made[kCount];
        some.ratios(made);
        ratios_.count(made, kCount);
      }
    }
    taken_ += plain ? kCount : 0;
    made_ += found.made;
    half_ += found.half;
    bf16_ += found.bf16;
  }

  void count_taken() {
    ratios_.zeros += ratios_.count_bytes(taken_bytes_, taken_, taken_bytes_);
    taken_ = 0;
  }

  void count_given() {
    gradients_.count_bytes(given_bytes_, given_, given_bytes_);
    given_ = 0;
  }

  // How many bytes are 0 or 255. Behind them there is room for kLanes.
  static int64_t rest_of(uint8_t* bytes, int64_t count) {
    std::memset(bytes + count, 1, kLanes);
    Lanes seen = {};
    for (int64_t i = 0; i < count; i += kLanes) {
      Lanes given;
      std::memcpy(&given, bytes + i, sizeof given);
      seen -= reinterpret_cast<Lanes>(given + 1 < 2);
    }
    return sum_of(seen);
  }

  Counter gradients_, ratios_;
  uint8_t given_bytes_[kCounted + kLanes], taken_bytes_[kCounted];
  int64_t given_ = 0, taken_ = 0, made_ = 0, half_ = 0, bf16_ = 0;
};

}  // namespace amp
