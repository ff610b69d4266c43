// Which 16-bit copies of FP32 tensors are no longer these rounded: of large tensors some runs of elements are looked at.

#include "types.h"

namespace {

using namespace amp;

struct Pair {
  int64_t count, type, wide, low;
  int64_t channels, pixels;  // 1 and 1 but where the copy has its channels last and the FP32 tensor its pixels
};

constexpr int64_t kRun = 64, kRuns = 16;

template <class L>
void read(const Pair& pair, int64_t start, int64_t count, L* found) {
  const L* low = reinterpret_cast<const L*>(pair.low);
  const int64_t image = pair.channels * pair.pixels;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = (start + i) % image;
    found[i] = low[start + i - at + at % pair.pixels * pair.channels + at / pair.pixels];
  }
}

// Whether 16 bits are a number rounded, bit for bit, but that every NaN is one.
inline bool is_rounded(uint16_t wanted, uint16_t held, uint16_t infinity) {
  return (wanted == held) | (((wanted & 0x7fff) > infinity) & ((held & 0x7fff) > infinity));
}

template <class L>
bool differs(const Pair& pair, int64_t start, int64_t count, uint16_t infinity) {
  const L* low = reinterpret_cast<const L*>(pair.low) + start;
  L rounded[kRun], turned[kRun];
  narrow(reinterpret_cast<const float*>(pair.wide) + start, rounded, count);
  if (pair.channels > 1) {
    read(pair, start, count, turned);
    low = turned;
  }
  const uint16_t* wanted = reinterpret_cast<const uint16_t*>(rounded);
  const uint16_t* held = reinterpret_cast<const uint16_t*>(low);
  uint16_t alike = 1;
  for (int64_t i = 0; i < count; ++i) alike &= is_rounded(wanted[i], held[i], infinity);
  return alike == 0;
}

template <class L>
bool is_stale(const Pair& pair, int64_t turn, uint16_t infinity) {
  const bool whole = pair.count <= kRun * kRuns;
  const int64_t spacing = whole ? kRun : (pair.count + kRuns - 1) / kRuns;
  const int64_t first = turn % ((spacing + kRun - 1) / kRun) * kRun;
  for (int64_t start = first; start < pair.count; start += spacing)
    if (differs<L>(pair, start, std::min(kRun, pair.count - start), infinity)) return true;
  return false;
}

}  // namespace

extern "C" {

// Sets the flags of the pairs that differ, and returns how many do. All elements of a large tensor have been looked at
// after as many turns as a run fits between the starts of two.
int64_t amp_stale(const Pair* pairs, int64_t count, int64_t turn, uint8_t* flags) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Pair& pair = pairs[i];
    flags[i] = pair.type == kBf16 ? is_stale<Bf16>(pair, turn, 0x7f80) : is_stale<Half>(pair, turn, 0x7c00);
    found += flags[i];
  }
  return found;
}

}  // extern "C"
