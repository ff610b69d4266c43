// Patches of bf16 images as the rows of a matrix, and gradients of such rows added up to gradients of images.

#include <vector>

#include "types.h"

namespace {

using namespace amp;

struct Pair {
  int64_t down, across;
};

// Along one dimension, the place of the window whose element `k` is pixel `at`; negative where there is none.
inline int64_t place_of(int64_t at, int64_t k, int64_t padding, int64_t dilation, int64_t stride, int64_t places) {
  const int64_t from = at + padding - k * dilation;
  return from >= 0 && from % stride == 0 && from / stride < places ? from / stride : -1;
}

struct Shape {
  int64_t batch, channels, height, width;
  int64_t batch_step, channel_step, row_step, column_step;  // elements from one to the next
  Pair places, kernel, stride, padding, dilation;

  int64_t elements() const { return kernel.down * kernel.across; }  // of a patch, per channel
};

// Calls `body(element, pixel)` for the elements of a patch: the pixel is the first channel's, negative in the padding.
template <class Body>
void for_elements(const Shape& s, int64_t image, int64_t row, int64_t column, const Body& body) {
  for (int64_t i = 0; i < s.kernel.down; ++i)
    for (int64_t j = 0; j < s.kernel.across; ++j) {
      const int64_t y = row * s.stride.down - s.padding.down + i * s.dilation.down;
      const int64_t x = column * s.stride.across - s.padding.across + j * s.dilation.across;
      const bool there = y >= 0 && y < s.height && x >= 0 && x < s.width;
      body(i * s.kernel.across + j, there ? image * s.batch_step + y * s.row_step + x * s.column_step : -1);
    }
}

}  // namespace

extern "C" {

void amp_unfold(const Shape* shape, const uint16_t* images, uint16_t* rows, int threads) {
  const Shape& s = *shape;
  const int64_t count = s.batch * s.places.down * s.places.across, step = s.elements();
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t p = 0; p < count; ++p) {
    const int64_t column = p % s.places.across, row = p / s.places.across % s.places.down;
    uint16_t* target = rows + p * s.channels * step;
    for_elements(s, p / (s.places.down * s.places.across), row, column, [&](int64_t element, int64_t pixel) {
      uint16_t* to = target + element;
      if (pixel < 0)
        for (int64_t c = 0; c < s.channels; ++c) to[c * step] = 0;
      else
        for (int64_t c = 0; c < s.channels; ++c) to[c * step] = images[pixel + c * s.channel_step];
    });
  }
}

void amp_fold(const Shape* shape, uint16_t* images, const uint16_t* rows, int threads) {
  const Shape& s = *shape;
  const int64_t count = s.batch * s.height * s.width, step = s.elements();
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> sums(static_cast<size_t>(s.channels));
#pragma omp for schedule(static)
    for (int64_t p = 0; p < count; ++p) {
      const int64_t x = p % s.width, y = p / s.width % s.height, image = p / (s.height * s.width);
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int64_t i = 0; i < s.kernel.down; ++i)
        for (int64_t j = 0; j < s.kernel.across; ++j) {
          const int64_t row = place_of(y, i, s.padding.down, s.dilation.down, s.stride.down, s.places.down);
          const int64_t column = place_of(x, j, s.padding.across, s.dilation.across, s.stride.across, s.places.across);
          if (row < 0 || column < 0) continue;
          const int64_t place = (image * s.places.down + row) * s.places.across + column;
          const uint16_t* from = rows + place * s.channels * step + i * s.kernel.across + j;
          for (int64_t c = 0; c < s.channels; ++c) sums[c] += load(Bf16{from[c * step]});
        }
      uint16_t* to = images + image * s.batch_step + y * s.row_step + x * s.column_step;
      for (int64_t c = 0; c < s.channels; ++c) store(sums[c], reinterpret_cast<Bf16*>(to + c * s.channel_step));
    }
  }
}

}  // extern "C"
