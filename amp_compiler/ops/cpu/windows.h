// Windows of images: the patches of a convolution, and what a pooling takes one pixel from.

#pragma once

#include <cstdint>

namespace amp {

struct Pair {
  int64_t down, across;
};

// Along one dimension, the place of the window whose element `k` is pixel `at`; negative where there is none.
inline int64_t place_of(int64_t at, int64_t k, int64_t padding, int64_t dilation, int64_t stride, int64_t places) {
  const int64_t from = at + padding - k * dilation;
  return from >= 0 && from % stride == 0 && from / stride < places ? from / stride : -1;
}

}  // namespace amp
