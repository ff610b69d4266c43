// What loops over the steps of a recurrent layer have in common; see recurrent.cpp.
//
// Everything is kept transposed, units before batch: then the weights are the left factor of every matrix product, lie
// in memory as the processor wants them, and are read where they are. Threads share the units and meet once per step.

#pragma once

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "blocks.h"
#include "types.h"

namespace amp {

struct Shape {
  int64_t steps, batch, features, hidden, reverse;
};

// A matrix whose columns are the batch, as a right factor: [16 columns][inner / 2][column][2], zeros beside the batch.
class Columns {
 public:
  Columns(int64_t inner, int64_t batch)
      : inner_(inner), batch_(batch), values_(static_cast<size_t>(2 * tiles(batch, kBlock) * kTile * inner)) {}

  uint16_t* at(int64_t m, int64_t column) {
    return values_.data() + (column / kTile * inner_ + m / 2 * 2) * kTile + 2 * (column % kTile) + m % 2;
  }
  const uint16_t* tile(int64_t column) const { return values_.data() + column * inner_; }
  int64_t tile_size() const { return kTile * inner_; }

  // From rows [batch][inner]: the part of one of `count` threads, in tiles of 32 inner elements.
  void fill(const uint16_t* rows, int mine, int count) {
    const int64_t each = tiles(tiles(inner_, kDepth), count) * kDepth;
    const int64_t first = mine * each, last = std::min(inner_, first + each);
    for (int64_t b = 0; b < batch_; ++b)
      for (int64_t m = first; m < last; m += 2) std::memcpy(at(m, b), rows + b * inner_ + m, 2 * sizeof(uint16_t));
  }

 private:
  int64_t inner_, batch_;
  std::vector<uint16_t> values_;
};

inline Operand operand(const uint16_t* weight, int64_t width, int64_t row, const Columns& columns, int64_t column) {
  return {weight + row * width, width, kDepth, kTile * width, columns.tile(column), columns.tile_size(), width};
}

// 32 units for up to 32 columns of the batch, as the batch-first tensors outside have them: whole lines of the cache.
using Lines = uint16_t[kBlock][kBlock];

// What both ways through time have in common: the layer and its threads.
class Loops {
 protected:
  Loops(const Shape& shape, int threads) : s_(shape), threads_(threads) {}

  int64_t time(int64_t step) const { return s_.reverse ? s_.steps - 1 - step : step; }

  // Calls `body(mine, count)` on the threads: the thread's number, and how many there are. They meet at
  // `#pragma omp barrier`.
  template <class Body>
  void with_team(const Body& body) const {
#pragma omp parallel num_threads(threads_)
    {
      const TileShape shape;
      body(omp_get_thread_num(), omp_get_num_threads());
    }
  }

  // Calls `body(unit)` with the first unit of every 32 that one thread computes.
  template <class Body>
  void for_units(int mine, int count, const Body& body) const {
    for (int64_t unit = mine * kBlock; unit < s_.hidden; unit += count * kBlock) body(unit);
  }

  // Calls `body(unit, column)` with the first unit and the first column of every block of one thread.
  template <class Body>
  void for_blocks(int mine, int count, const Body& body) const {
    for_units(mine, count, [&](int64_t unit) {
      for (int64_t column = 0; column < s_.batch; column += kBlock) body(unit, column);
    });
  }

  int64_t row_of(int64_t step, int64_t b) const { return (time(step) * s_.batch + b) * s_.hidden; }

  const Shape s_;
  const int threads_;
};

// The recurrent weight of 32 units, [unit][gate rows], from [gate rows][unit].
inline void transpose(const uint16_t* weight, int64_t width, int64_t hidden, int64_t unit, uint16_t* out) {
  for (int64_t row = 0; row < width; row += kBlock) {
    Lines lines;
    for (int64_t r = 0; r < kBlock; ++r)
      for (int64_t u = 0; u < kBlock; ++u) lines[u][r] = weight[(row + r) * hidden + unit + u];
    for (int64_t u = 0; u < kBlock; ++u) std::memcpy(out + (unit + u) * width + row, lines[u], sizeof lines[u]);
  }
}

}  // namespace amp
