// What the processor multiplies: 32 x 32 elements of a product of two 16-bit matrices, in AMX tiles, in AVX512-BF16
// vectors, or one by one where it has neither. A file of its own because recurrent layers and attention, whose
// matrices are laid out otherwise than the products of product.h, need this much and no more.

#pragma once

#include "types.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace amp {

constexpr int64_t kTile = 16;   // rows or columns of a tile
constexpr int64_t kDepth = 32;  // inner elements of a tile
constexpr int64_t kBlock = 32;  // rows and columns that are in registers together

// Two factors of 32 x 32 elements, laid out for the processor: the left one in tiles of 16 rows and 32 inner elements,
// the right one in two tiles of 16 columns, each with pairs of inner elements side by side: [inner / 2][column][2].
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

class [[maybe_unused]] TileShape {};
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

}  // namespace amp
