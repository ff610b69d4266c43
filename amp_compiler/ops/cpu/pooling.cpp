// Max-pooling that notes for each result where in its window the largest pixel stands, and the way back for gradients.

#include <limits>
#include <vector>

#include "types.h"
#include "windows.h"

namespace {

using namespace amp;

struct Shape {
  int64_t batch, channels, height, width;
  Pair places, kernel, stride, padding, dilation;
};

// Where the pixels of images lie: elements from one to the next.
struct Steps {
  int64_t image, channel, row, column;
};

constexpr int64_t kLanes = 64;  // channels that are worked on together

// For each pixel of a dimension and each element of a window, the place of the window that has it there.
std::vector<int64_t> places_of(int64_t pixels, int64_t kernel, int64_t padding, int64_t dilation, int64_t stride,
                               int64_t places) {
  std::vector<int64_t> found;
  for (int64_t at = 0; at < pixels; ++at)
    for (int64_t k = 0; k < kernel; ++k) found.push_back(place_of(at, k, padding, dilation, stride, places));
  return found;
}

// `kStep` is the number of elements between channels where it is known to be one, else 0.
template <class T, int64_t kStep>
void pool(const Shape& s, const Steps& in, const T* images, const Steps& out, T* largest, int8_t* offsets,
          int threads) {
  const int64_t from = kStep != 0 ? kStep : in.channel, to = kStep != 0 ? kStep : out.channel;
  const int64_t count = s.batch * s.places.down * s.places.across;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t place = 0; place < count; ++place) {
    const int64_t column = place % s.places.across, row = place / s.places.across % s.places.down;
    const int64_t image = place / (s.places.down * s.places.across);
    for (int64_t first = 0; first < s.channels; first += kLanes) {
      const int64_t lanes = std::min(kLanes, s.channels - first);
      float best[kLanes];
      int32_t where[kLanes];
      std::fill(best, best + kLanes, -std::numeric_limits<float>::infinity());
      std::fill(where, where + kLanes, -1);  // of a window without a pixel: no gradient goes through it
      bool found = false;
      for (int64_t i = 0; i < s.kernel.down; ++i)
        for (int64_t j = 0; j < s.kernel.across; ++j) {
          const int64_t y = row * s.stride.down - s.padding.down + i * s.dilation.down;
          const int64_t x = column * s.stride.across - s.padding.across + j * s.dilation.across;
          if (y < 0 || y >= s.height || x < 0 || x >= s.width) continue;
          const T* pixel = images + image * in.image + y * in.row + x * in.column + first * from;
          const int32_t element = static_cast<int32_t>(i * s.kernel.across + j);
          for (int64_t c = 0; c < lanes; ++c) {
            const float value = load(pixel[c * from]);
            // The first of equal pixels, and a NaN before any number, as in torch.
            const bool better = !found || value > best[c] || value != value;
            best[c] = better ? value : best[c];
            where[c] = better ? element : where[c];
          }
          found = true;
        }
      const int64_t target = image * out.image + row * out.row + column * out.column + first * to;
      for (int64_t c = 0; c < lanes; ++c) {
        store(best[c], largest + target + c * to);
        offsets[target + c * to] = static_cast<int8_t>(where[c]);
      }
    }
  }
}

template <class T, int64_t kStep>
void pool_backward(const Shape& s, const Steps& small, const T* gradient, const Steps& noted, const int8_t* offsets,
                   const Steps& large, T* images, int threads) {
  const int64_t from = kStep != 0 ? kStep : small.channel, at = kStep != 0 ? kStep : noted.channel;
  const int64_t to = kStep != 0 ? kStep : large.channel;
  const int64_t count = s.batch * s.height * s.width;
  const std::vector<int64_t> rows =
      places_of(s.height, s.kernel.down, s.padding.down, s.dilation.down, s.stride.down, s.places.down);
  const std::vector<int64_t> columns =
      places_of(s.width, s.kernel.across, s.padding.across, s.dilation.across, s.stride.across, s.places.across);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t pixel = 0; pixel < count; ++pixel) {
    const int64_t x = pixel % s.width, y = pixel / s.width % s.height, image = pixel / (s.height * s.width);
    for (int64_t first = 0; first < s.channels; first += kLanes) {
      const int64_t lanes = std::min(kLanes, s.channels - first);
      float sums[kLanes] = {};
      for (int64_t i = 0; i < s.kernel.down; ++i)
        for (int64_t j = 0; j < s.kernel.across; ++j) {
          const int64_t row = rows[y * s.kernel.down + i], column = columns[x * s.kernel.across + j];
          if (row < 0 || column < 0) continue;
          const T* given = gradient + image * small.image + row * small.row + column * small.column + first * from;
          const int8_t* where = offsets + image * noted.image + row * noted.row + column * noted.column + first * at;
          const int8_t element = static_cast<int8_t>(i * s.kernel.across + j);
          for (int64_t c = 0; c < lanes; ++c)
            sums[c] += where[c * at] == element ? load(given[c * from]) : 0.0f;
        }
      T* target = images + image * large.image + y * large.row + x * large.column + first * to;
      for (int64_t c = 0; c < lanes; ++c) store(sums[c], target + c * to);
    }
  }
}

template <class T>
void pool_of(const Shape& s, const Steps* steps, const void* images, void* largest, int8_t* offsets, int threads) {
  const bool dense = steps[0].channel == 1 && steps[1].channel == 1;
  const auto run = dense ? pool<T, 1> : pool<T, 0>;
  run(s, steps[0], static_cast<const T*>(images), steps[1], static_cast<T*>(largest), offsets, threads);
}

template <class T>
void pool_backward_of(const Shape& s, const Steps* steps, const void* gradient, const int8_t* offsets, void* images,
                      int threads) {
  const bool dense = steps[0].channel == 1 && steps[1].channel == 1 && steps[2].channel == 1;
  const auto run = dense ? pool_backward<T, 1> : pool_backward<T, 0>;
  run(s, steps[0], static_cast<const T*>(gradient), steps[1], offsets, steps[2], static_cast<T*>(images), threads);
}

}  // namespace

extern "C" {

// Steps of the images, and of the results with their offsets.
void amp_max_pool(const Shape* shape, const Steps* steps, int64_t type, const void* images, void* largest,
                  int8_t* offsets, int threads) {
  const auto run = type == kFloat ? pool_of<float> : type == kBf16 ? pool_of<Bf16> : pool_of<Half>;
  run(*shape, steps, images, largest, offsets, threads);
}

// Steps of the gradient that is given, of the offsets, and of the one that is made.
void amp_max_pool_backward(const Shape* shape, const Steps* steps, int64_t type, const void* gradient,
                           const int8_t* offsets, void* images, int threads) {
  const auto run =
      type == kFloat ? pool_backward_of<float> : type == kBf16 ? pool_backward_of<Bf16> : pool_backward_of<Half>;
  run(*shape, steps, gradient, offsets, images, threads);
}

}  // extern "C"
