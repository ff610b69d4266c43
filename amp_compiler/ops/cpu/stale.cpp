// Which 16-bit copies of FP32 tensors are no longer these rounded: of large tensors some runs of elements are looked at.

#include "types.h"

namespace {

using namespace amp;

struct Pair {
  int64_t count, type, wide, low, whole;
};

constexpr int64_t kRun = 64, kRuns = 16;

template <class L>
bool is_stale(const Pair& pair, int64_t turn) {
  const bool whole = pair.whole != 0 || pair.count <= kRun * kRuns;
  const int64_t spacing = whole ? kRun : (pair.count + kRuns - 1) / kRuns;
  const int64_t first = turn % ((spacing + kRun - 1) / kRun) * kRun;
  const float* wide = reinterpret_cast<const float*>(pair.wide);
  const L* low = reinterpret_cast<const L*>(pair.low);
  for (int64_t start = first; start < pair.count; start += spacing)
    if (one_strays(wide + start, low + start, std::min(kRun, pair.count - start))) return true;
  return false;
}

using Item = void* (*)(void*, ptrdiff_t);  // PyTuple_GetItem
using Address = void* (*)(void*);          // of the elements of a tensor of Python's

}  // namespace

extern "C" {

// Sets the flags of the pairs that differ, and of those whose FP32 tensor, at its place of a tuple, lies elsewhere. All
// elements of a large tensor have been looked at after as many turns as runs fit between the starts of two.
void amp_stale(const Pair* pairs, int64_t count, int64_t turn, uint8_t* flags, void* tuple, const int64_t* places,
               Item item, Address address) {
  for (int64_t i = 0; i < count; ++i) {
    const bool moved = places && reinterpret_cast<int64_t>(address(item(tuple, places[i]))) != pairs[i].wide;
    flags[i] = moved || (pairs[i].type == kBf16 ? is_stale<Bf16>(pairs[i], turn) : is_stale<Half>(pairs[i], turn));
  }
}

}  // extern "C"
