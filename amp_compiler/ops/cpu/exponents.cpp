// Counts of binary exponents behind a step, on many threads.

#include "counts.h"
#include "types.h"

namespace {

using namespace amp;

template <class Value>
void count_all(const Value* values, int64_t size, int64_t* counts, int threads) {
#pragma omp parallel num_threads(threads)
  {
    Counter mine;
#pragma omp for schedule(static) nowait
    for (int64_t from = 0; from < size; from += kCounted) mine.count(values + from, std::min(kCounted, size - from));
#pragma omp critical
    mine.add_to(counts);
  }
}

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
      count_all(static_cast<const float*>(values), size, counts, used);
    else if (type == kBf16)
      count_all(static_cast<const Bf16*>(values), size, counts, used);
    else
      count_all(static_cast<const Half*>(values), size, counts, used);
  }
}

// `found`: how many weights were changed, and how many of these changes are lost in FP16 and in BF16.
void amp_count_update(const float* before, const float* after, int64_t size, int64_t* counts, int64_t* found,
                      int threads) {
  constexpr int64_t kCount = Updates::kCount;
#pragma omp parallel num_threads(size < (1 << 15) ? 1 : threads)
  {
    UpdateCounter mine;
#pragma omp for schedule(static) nowait
    for (int64_t from = 0; from < size; from += kCount) {
      prefetch(before + from + 2 * kCount, after + from + 2 * kCount);
      mine.update(before + from, after + from, std::min(kCount, size - from));
    }
#pragma omp critical
    mine.add_to(nullptr, counts, found);
  }
}
}
