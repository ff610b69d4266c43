// Gradients of weight matrices that are products of two 16-bit matrices, made panel by panel where they are used:
// a panel stays in the nearest caches, so the gradient itself is never written to memory and never read from it.

#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "blocks.h"
#include "types.h"

namespace amp {

constexpr int64_t kPanelRows = 64;       // rows that are made together, at most
constexpr int64_t kPanelColumns = 8192;  // and columns: memory is read best in long runs
constexpr int64_t kPanel = 1 << 18;      // elements that are made together, at most: they stay in the second cache

// rows [i, j] = sum over m of left[i * left_row + m * left_inner] * right[m * right_inner + j * right_column], rounded to
// bf16, and in fp32 the sum over k where places[k] = i of values[order[k] * columns + j]
struct Product {
  int64_t left, left_row, left_inner;
  int64_t right, right_inner, right_column;
  int64_t rows, columns, inner;
  int64_t values, places, order, added;  // places in ascending order; `added` of them
  int64_t counted;                       // whether the check has added its squares to the norm
};

// The values that are added to one row.
class Additions {
 public:
  Additions(const Product& product, int64_t row) : product_(product) {
    const int64_t* places = reinterpret_cast<const int64_t*>(product.places);
    const auto [first, last] = std::equal_range(places, places + product.added, row);
    first_ = first - places;
    last_ = last - places;
  }

  bool empty() const { return first_ == last_; }

  void add(int64_t column, int64_t count, float* line) const {
    for (int64_t k = first_; k < last_; ++k) {
      const int64_t one = reinterpret_cast<const int64_t*>(product_.order)[k];
      const float* values = reinterpret_cast<const float*>(product_.values) + one * product_.columns + column;
      for (int64_t j = 0; j < count; ++j) line[j] += values[j];
    }
  }

 private:
  const Product& product_;
  int64_t first_, last_;
};

// The right matrix with pairs of inner elements side by side: [16 columns][inner / 2][column][2], padded with zeros
// to the depth of tiles where these are used.
// The left one for a panel of rows: [16 rows][inner / 32][row][32].
class Packed {
 public:
  static constexpr int64_t kFew = 8;  // inner elements up to which rows are made one by one

  explicit Packed(const Product& product)
      : product_(product),
        depths_(tiles(product.inner, kDepth)),
        padded_(few() ? 2 * tiles(product.inner, 2) : depths_ * kDepth),
        right_(new uint16_t[static_cast<size_t>(column_tiles() * padded_ * kTile)]) {}

  const Product& product() const { return product_; }
  int64_t column_tiles() const { return 2 * tiles(product_.columns, 2 * kTile); }

  void pack_columns(int64_t tile) {
    uint16_t* target = right_.get() + tile * padded_ * kTile;
    const uint16_t* source = reinterpret_cast<const uint16_t*>(product_.right);
    const int64_t first = tile * kTile, count = std::clamp(product_.columns - first, int64_t{0}, kTile);
    source += first * product_.right_column;
    for (int64_t pair = 0; pair < padded_ / 2; ++pair, target += 2 * kTile) {
      const int64_t m = 2 * pair, there = std::clamp(product_.inner - m, int64_t{0}, int64_t{2});
      const uint16_t* one = source + m * product_.right_inner;
      if (there == 2 && count == kTile && product_.right_column == 1) {
        const uint16_t* two = one + product_.right_inner;
        for (int64_t j = 0; j < kTile; ++j) {
          target[2 * j] = one[j];
          target[2 * j + 1] = two[j];
        }
        continue;
      }
      for (int64_t j = 0; j < kTile; ++j)
        for (int64_t k = 0; k < 2; ++k)
          target[2 * j + k] =
              j < count && k < there ? one[k * product_.right_inner + j * product_.right_column] : uint16_t{0};
    }
  }

  // Makes rows [row, row + rows) and columns [column, column + columns) of the product, rounded to bf16, row after row.
  void panel(int64_t row, int64_t rows, int64_t column, int64_t columns, Bf16* out) const;

  // A part of one row, rounded to bf16 and left in fp32: the faster way where there are few inner elements.
  bool few() const { return product_.inner <= kFew; }
  void line(int64_t row, int64_t column, int64_t columns, float* out) const;

 private:
  // Rows of the left matrix that all have their elements 32 apart in the packed one, for one pair of inner elements.
  void pack_pair(const uint16_t* source, int64_t rows, bool two, uint16_t* target) const {
    const uint16_t* next = source + (two ? product_.left_inner : 0);
#ifdef __AVX512BF16__
    if (rows == kTile && product_.left_row == 1) {
      const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
      const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(next)));
      const __m512i both = two ? _mm512_or_si512(low, _mm512_slli_epi32(high, 16)) : low;
      const __m512i places = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
      _mm512_i32scatter_epi32(target, places, both, 4);
      return;
    }
#endif
    for (int64_t i = 0; i < rows; ++i) {
      target[i * kDepth] = source[i * product_.left_row];
      target[i * kDepth + 1] = two ? next[i * product_.left_row] : uint16_t{0};
    }
  }

  void pack_rows(int64_t row, int64_t rows, uint16_t* target) const {
    const int64_t padded = depths_ * kDepth;
    if (rows < kPanelRows || padded > product_.inner) std::fill(target, target + padded * kPanelRows, uint16_t{0});
    const uint16_t* left = reinterpret_cast<const uint16_t*>(product_.left) + row * product_.left_row;
    for (int64_t tile = 0; tile < tiles(rows, kTile); ++tile) {
      const uint16_t* source = left + tile * kTile * product_.left_row;
      for (int64_t m = 0; m < product_.inner; m += 2)
        pack_pair(source + m * product_.left_inner, std::min(kTile, rows - tile * kTile), m + 1 < product_.inner,
                  target + (tile * depths_ + m / kDepth) * kTile * kDepth + m % kDepth);
    }
  }

  const Product& product_;
  int64_t depths_, padded_;
  std::unique_ptr<uint16_t[]> right_;  // written by pack_columns
};

inline void Packed::panel(int64_t row, int64_t rows, int64_t column, int64_t columns, Bf16* out) const {
  thread_local std::vector<uint16_t> left;
  left.resize(static_cast<size_t>(depths_ * kDepth * kPanelRows));
  pack_rows(row, rows, left.data());
  alignas(64) float values[kBlock * kBlock];
  for (int64_t done = 0; done < columns; done += kBlock)
    for (int64_t down = 0; down < rows; down += kBlock) {
      const int64_t height = std::min(kBlock, rows - down), width = std::min(kBlock, columns - done);
      const int64_t tile = (column + done) / kTile;
      const Operand operand{left.data() + down * padded_, kDepth,  kTile * kDepth, kTile * padded_,
                            right_.get() + tile * padded_ * kTile, kTile * padded_, product_.inner};
      block(&operand, 1, true, values);
      for (int64_t i = 0; i < height; ++i)
        narrow_line(values + kBlock * i, width, out + (down + i) * columns + done);
    }
}

inline void Packed::line(int64_t row, int64_t column, int64_t columns, float* out) const {
  alignas(64) uint16_t left[kDepth] = {};
  const uint16_t* source = reinterpret_cast<const uint16_t*>(product_.left) + row * product_.left_row;
  for (int64_t m = 0; m < product_.inner; ++m) left[m] = source[m * product_.left_inner];
  for (int64_t done = 0; done < columns; done += kTile)  // `out` has room for whole tiles
    vector_line(left, right_.get() + (column + done) / kTile * padded_ * kTile, product_.inner, out + done);
}

// Up to how many inner elements a product is made here as fast as by a library: all of them where the processor has
// tiles, few where it has vectors of pairs, none where it has neither.
inline int64_t most_inner() {
  if (tiles_allowed()) return int64_t{1} << 40;
#ifdef __AVX512BF16__
  return 32;
#else
  return 0;
#endif
}

// Whether no element can be anything but finite, known from the largest ones of the factors and of the added rows.
inline bool surely_finite(const Product& product) {
  const auto largest = [](int64_t address, int64_t outer, int64_t outer_step, int64_t inner, int64_t inner_step) {
    if (outer_step == 1) {
      std::swap(outer, inner);
      std::swap(outer_step, inner_step);
    }
    const uint16_t* values = reinterpret_cast<const uint16_t*>(address);
    uint16_t most = 0;
    for (int64_t i = 0; i < outer; ++i) {
      const uint16_t* line = values + i * outer_step;
      if (inner_step == 1)
        for (int64_t j = 0; j < inner; ++j) most = std::max<uint16_t>(most, line[j] & 0x7fffu);
      else
        for (int64_t j = 0; j < inner; ++j) most = std::max<uint16_t>(most, line[j * inner_step] & 0x7fffu);
    }
    return load(Bf16{most});
  };
  const Product& p = product;
  uint32_t most = 0;
  for (int64_t k = 0; k < p.added; ++k) {
    const int64_t one = reinterpret_cast<const int64_t*>(p.order)[k];
    const float* values = reinterpret_cast<const float*>(p.values) + one * p.columns;
    for (int64_t j = 0; j < p.columns; ++j) {
      uint32_t bits;
      std::memcpy(&bits, values + j, sizeof bits);
      most = std::max(most, bits & 0x7fffffffu);
    }
  }
  float added;
  std::memcpy(&added, &most, sizeof added);
  const double left = largest(p.left, p.rows, p.left_row, p.inner, p.left_inner);
  const double right = largest(p.right, p.inner, p.right_inner, p.columns, p.right_column);
  const double sum = static_cast<double>(added) * static_cast<double>(p.added);
  return left * right * static_cast<double>(p.inner) + sum < 3.3e38;  // false for NaN; the largest bf16 is 3.39e38
}

}  // namespace amp
