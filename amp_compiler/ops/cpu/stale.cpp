// Which 16-bit copies of FP32 tensors are no longer these rounded: of large tensors some runs of elements are looked at.

#include "types.h"

namespace {

using namespace amp;

struct Pair {
  int64_t count, type, wide, low;
};

constexpr int64_t kRun = 64, kRuns = 16;

// Bit for bit, but that every NaN is one.
template <class L>
bool differs(const Pair& pair, int64_t start, int64_t count, uint16_t infinity) {
  L rounded[kRun];
  uint16_t wanted[kRun], alike = 1;
  const float* wide = reinterpret_cast<const float*>(pair.wide) + start;
  if (count == kRun)  // a number that the compiler knows
    narrow(wide, rounded, kRun);
  else
    narrow(wide, rounded, count);
  const uint16_t* held = reinterpret_cast<const uint16_t*>(pair.low) + start;
  if (std::memcmp(rounded, held, sizeof(L) * static_cast<size_t>(count)) == 0) return false;
  std::memcpy(wanted, rounded, sizeof(L) * static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i)
    alike &= (wanted[i] == held[i]) | (((wanted[i] & 0x7fff) > infinity) & ((held[i] & 0x7fff) > infinity));
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

// Sets the flags of the pairs that differ. All elements of a large tensor have been looked at after as many turns as runs
// fit between the starts of two.
void amp_stale(const Pair* pairs, int64_t count, int64_t turn, uint8_t* flags) {
  for (int64_t i = 0; i < count; ++i)
    flags[i] = pairs[i].type == kBf16 ? is_stale<Bf16>(pairs[i], turn, 0x7f80) : is_stale<Half>(pairs[i], turn, 0x7c00);
}

}  // extern "C"
