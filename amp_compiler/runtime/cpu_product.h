// Gradients of weight matrices that are products of two 16-bit matrices, made panel by panel where they are used:
// a panel stays in the nearest caches, so the gradient itself is never written to memory and never read from it.

#pragma once

#include <memory>
#include <vector>

#include "cpu_types.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace amp {

constexpr int64_t kTile = 16;          // rows or columns of a tile
constexpr int64_t kDepth = 32;         // inner elements of a tile
constexpr int64_t kBlock = 32;         // rows and columns that are in registers together
constexpr int64_t kPanelRows = 64;     // rows that are made together, at most
constexpr int64_t kPanelColumns = 8192;  // and columns: memory is read best in long runs
constexpr int64_t kPanel = 1 << 18;      // elements that are made together, at most: they stay in the second cache

// rows [i, j] = sum over m of left[i * left_row + m * left_inner] * right[m * right_inner + j * right_column]
struct Product {
  int64_t left, left_row, left_inner;
  int64_t right, right_inner, right_column;
  int64_t rows, columns, inner;
  int64_t counted;  // whether the check has added its squares to the norm
};

// Two factors of 32 x 32 elements, laid out for the processor: the left one in tiles of 16 rows and 32 inner elements,
// the right one as `Packed` has it, two tiles of 16 columns.
struct Operand {
  const uint16_t* left;
  int64_t left_row, left_depth, left_half;  // elements from one row, tile of inner elements, and 16 rows to the next
  const uint16_t* right;
  int64_t right_tile;  // elements from one tile of columns to the next
  int64_t inner;

  const uint16_t* line(int64_t row, int64_t m) const {
    return left + (row / 16) * left_half + (row % 16) * left_row + (m / 32) * left_depth + m % 32;
  }
};

inline int64_t tiles(int64_t count, int64_t size) { return (count + size - 1) / size; }

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
    for (int64_t tile = 0; tile < tiles(rows, kTile); ++tile) {
      const uint16_t* source = reinterpret_cast<const uint16_t*>(product_.left) + (row + tile * kTile) * product_.left_row;
      for (int64_t m = 0; m < product_.inner; m += 2)
        pack_pair(source + m * product_.left_inner, std::min(kTile, rows - tile * kTile), m + 1 < product_.inner,
                  target + (tile * depths_ + m / kDepth) * kTile * kDepth + m % kDepth);
    }
  }

  const Product& product_;
  int64_t depths_, padded_;
  std::unique_ptr<uint16_t[]> right_;  // written by pack_columns
};

#if defined(__AMX_BF16__) && defined(__linux__)

// The shape of all eight tile registers, 16 rows of 64 bytes, for as long as one of these lives. What was there before
// comes back: others, such as oneDNN, remember for each thread how they left them.
class TileShape {
 public:
  TileShape() {
    alignas(64) uint8_t shape[64] = {};
    shape[0] = 1;  // palette
    for (int i = 0; i < 8; ++i) {
      const uint16_t bytes = 64;
      std::memcpy(shape + 16 + 2 * i, &bytes, sizeof bytes);
      shape[48 + i] = 16;
    }
    _tile_storeconfig(before_);
    _tile_loadconfig(shape);
  }
  ~TileShape() {
    if (before_[0] != 0)
      _tile_loadconfig(before_);
    else
      _tile_release();
  }
  TileShape(const TileShape&) = delete;
  TileShape& operator=(const TileShape&) = delete;

 private:
  alignas(64) uint8_t before_[64];
};

inline bool tiles_allowed() {  // Linux gives them to a process that asks
  static const bool allowed = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
  return allowed;
}

inline void tile_block(const Operand* operands, int count, bool wide, float* out) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (const Operand* one = operands; one != operands + count; ++one) {
    const int64_t step = one->left_row * 2;  // bytes
    const uint16_t *left = one->left, *left2 = left + one->left_half;
    const uint16_t *right = one->right, *right2 = right + one->right_tile;
    for (int64_t m = 0; m < one->inner; m += kDepth, left += one->left_depth, left2 += one->left_depth) {
      _tile_loadd(4, left, step);
      _tile_loadd(5, left2, step);
      _tile_loadd(6, right + m * kTile, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
      if (!wide) continue;
      _tile_loadd(7, right2 + m * kTile, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, 128);
  _tile_stored(1, out + kTile, 128);
  _tile_stored(2, out + kBlock * kTile, 128);
  _tile_stored(3, out + kBlock * kTile + kTile, 128);
}

#else

class TileShape {};
inline bool tiles_allowed() { return false; }
inline void tile_block(const Operand*, int, bool, float*) {}

#endif

#ifdef __AVX512BF16__

inline __m512bh pairs(const void* from) {
  const __m512i bits = _mm512_loadu_si512(from);
  __m512bh result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline __m512bh same_pair(const uint16_t* from) {
  int32_t pair;
  std::memcpy(&pair, from, sizeof pair);
  const __m512i bits = _mm512_set1_epi32(pair);
  __m512bh result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline __m512i rounded(__m512 values) {  // as `store`
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
  const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  return _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), nan, _mm512_set1_epi32(0x7fc0));
}

inline void narrow_tile(const float* values, int64_t count, Bf16* out) {
  const __mmask16 there = static_cast<__mmask16>((1u << count) - 1u);
  _mm256_mask_storeu_epi16(out, there, _mm512_cvtepi32_epi16(rounded(_mm512_loadu_ps(values))));
}

inline void narrow_line(const float* values, int64_t count, Bf16* out) {
  narrow_tile(values, std::min(kTile, count), out);
  if (count > kTile) narrow_tile(values + kTile, count - kTile, out + kTile);
}

// 16 elements of a row: `right` is a tile of columns.
inline void vector_line(const uint16_t* left, const uint16_t* right, int64_t inner, float* out) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t m = 0; m < inner; m += 2) sum = _mm512_dpbf16_ps(sum, same_pair(left + m), pairs(right + m * kTile));
  _mm512_storeu_ps(out, _mm512_castsi512_ps(_mm512_slli_epi32(rounded(sum), 16)));
}

constexpr int kRows = 8;  // with two tiles of columns, 16 of 32 registers

inline void vector_block(const Operand* operands, int count, bool, float* out) {
  for (int64_t row = 0; row < kBlock; row += kRows) {
    __m512 sums[kRows][2];
    for (auto& sum : sums) sum[0] = sum[1] = _mm512_setzero_ps();
    for (const Operand* one = operands; one != operands + count; ++one)
      for (int64_t m = 0; m < one->inner; m += 2) {
        const uint16_t* right = one->right + m * kTile;
        const __m512bh first = pairs(right), second = pairs(right + one->right_tile);
        const uint16_t* line = one->line(row, m);
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
          const __m512bh pair = same_pair(line + i * one->left_row);
          sums[i][0] = _mm512_dpbf16_ps(sums[i][0], pair, first);
          sums[i][1] = _mm512_dpbf16_ps(sums[i][1], pair, second);
        }
      }
    for (int i = 0; i < kRows; ++i) {
      _mm512_storeu_ps(out + (row + i) * kBlock, sums[i][0]);
      _mm512_storeu_ps(out + (row + i) * kBlock + kTile, sums[i][1]);
    }
  }
}

#else

inline void narrow_line(const float* values, int64_t count, Bf16* out) { narrow(values, out, count); }

inline void vector_line(const uint16_t* left, const uint16_t* right, int64_t inner, float* out) {
  Bf16 narrowed[kTile];
  float sums[kTile] = {};
  for (int64_t m = 0; m < inner; ++m)
    for (int64_t j = 0; j < kTile; ++j)
      sums[j] += load(Bf16{left[m]}) * load(Bf16{right[m / 2 * 2 * kTile + 2 * j + m % 2]});
  narrow(sums, narrowed, kTile);
  widen(narrowed, out, kTile, 1.0f);
}

inline void vector_block(const Operand* operands, int count, bool, float* out) {
  std::fill(out, out + kBlock * kBlock, 0.0f);
  for (const Operand* one = operands; one != operands + count; ++one)
    for (int64_t row = 0; row < kBlock; ++row)
      for (int64_t m = 0; m < one->inner; ++m) {
        const float value = load(Bf16{*one->line(row, m)});
        for (int64_t j = 0; j < kBlock; ++j) {
          const int64_t at = (j / kTile) * one->right_tile + (m / 2) * 2 * kTile + 2 * (j % kTile) + m % 2;
          out[row * kBlock + j] += value * load(Bf16{one->right[at]});
        }
      }
}

#endif

// 32 x 32 elements in fp32: the sum of the products of the operands. Where they are not `wide`, the right half of the
// columns may hold anything.
inline void block(const Operand* operands, int count, bool wide, float* out) {
  if (tiles_allowed())
    tile_block(operands, count, wide, out);
  else
    vector_block(operands, count, wide, out);
}

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
      for (int64_t i = 0; i < height; ++i) {
        narrow_line(values + kBlock * i, width, out + (down + i) * columns + done);
      }
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

// Whether no element can be anything but finite, known from the largest ones of the factors alone.
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
  const double left = largest(product.left, product.rows, product.left_row, product.inner, product.left_inner);
  const double right = largest(product.right, product.inner, product.right_inner, product.columns, product.right_column);
  return left * right * static_cast<double>(product.inner) < 3.3e38;  // false for NaN; the largest bf16 is 3.39e38
}

}  // namespace amp
