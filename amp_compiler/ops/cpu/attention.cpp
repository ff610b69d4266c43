// The backward of bf16 attention on a CPU. One thread does one head at a time: its keys and values stay in the nearest
// caches, queries come in chunks, and the probabilities are made again from the forward's logarithms of sums, so memory
// beyond the gradients does not grow with queries times keys.
//
// Scores are kept transposed, keys before queries: P^T and dS^T are then the left factors of dV = P^T dO and
// dK = dS^T Q as they stand, and only dQ = dS K needs the other order.

#include <vector>

#include "blocks.h"
#include "math.h"
#include "types.h"

namespace {

using namespace amp;

constexpr int64_t kChunk = 128;  // queries that are worked on together

// [batch, heads, rows, width]; the last dimension is dense. Steps are in elements.
struct Heads {
  uint16_t* data;
  int64_t batch, head, row;

  uint16_t* at(int64_t b, int64_t h) const { return data + b * batch + h * head; }
};

// [batch, heads, queries, keys], added to the scores; no data where there is none.
struct Mask {
  void* data;
  int64_t type, batch, head, query, key;
};

// Logarithms of the sums of exponentials, [batch, heads, queries].
struct Sums {
  const float* data;
  int64_t batch, head, query;
};

struct Attention {
  int64_t batch, heads, queries, keys, width, causal;
  Heads d_out, query, key, value, out, d_query, d_key, d_value;
  Mask mask;
  Sums sums;
};

int64_t padded(int64_t count) { return tiles(count, kBlock) * kBlock; }

// A matrix as the left factor: its rows one after the other, zeros where there are none.
class Left {
 public:
  Left(int64_t rows, int64_t inner) : inner_(padded(inner)), values_(static_cast<size_t>(padded(rows) * inner_)) {}

  uint16_t* row(int64_t row) { return values_.data() + row * inner_; }

  void fill(const uint16_t* source, int64_t step, int64_t rows, int64_t width) {
    for (int64_t i = 0; i < rows; ++i) std::memcpy(row(i), source + i * step, static_cast<size_t>(width) * 2);
  }

  // The product with some columns of the right factor, over the first `inner` elements.
  void times(int64_t row, const uint16_t* right, int64_t right_tile, int64_t inner, float* out) const {
    const Operand operand{values_.data() + row * inner_, inner_, kDepth, kTile * inner_, right, right_tile, inner};
    block(&operand, 1, true, out);
  }

 private:
  int64_t inner_;
  std::vector<uint16_t> values_;
};

// A matrix as the right factor, in pairs of inner elements: [16 columns][inner / 2][column], zeros beside the inner ones.
class Right {
 public:
  Right(int64_t inner, int64_t columns)
      : pairs_(padded(inner) / 2), values_(static_cast<size_t>(pairs_ * padded(columns))) {}

  const uint16_t* columns(int64_t column) const {
    return reinterpret_cast<const uint16_t*>(values_.data() + column * pairs_);
  }
  int64_t tile() const { return 2 * kTile * pairs_; }

  // Every row of the source is a column.
  void fill_columns(const uint16_t* source, int64_t step, int64_t rows, int64_t width) {
    for (int64_t j = 0; j < rows; ++j, source += step) {
      uint32_t* target = values_.data() + j / kTile * kTile * pairs_ + j % kTile;
      for (int64_t m = 0; m + 1 < width; m += 2, target += kTile) std::memcpy(target, source + m, sizeof *target);
      if (width % 2) *target = source[width - 1];
    }
  }

  // Every row of the source is a row.
  void fill_rows(const uint16_t* source, int64_t step, int64_t rows, int64_t width) {
    for (int64_t pair = 0; pair < pairs_; ++pair, source += 2 * step) {
      const int64_t there = std::clamp(rows - 2 * pair, int64_t{0}, int64_t{2});
      for (int64_t column = 0; column < width; column += kTile) {
        uint32_t* target = values_.data() + column * pairs_ + pair * kTile;
        const uint16_t *one = source + column, *two = one + step;
        const int64_t count = std::min(kTile, width - column);
        if (there == 2)
          for (int64_t j = 0; j < count; ++j) target[j] = one[j] | static_cast<uint32_t>(two[j]) << 16;
        else
          for (int64_t j = 0; j < count; ++j) target[j] = there ? one[j] : 0u;
      }
    }
  }

 private:
  int64_t pairs_;
  std::vector<uint32_t> values_;
};

class HeadBackward {
 public:
  HeadBackward(const Attention& attention, float scale)
      : a_(attention), scale_(scale), chunk_(std::min(kChunk, padded(a_.queries))), key_(a_.keys, a_.width),
        value_(a_.keys, a_.width), probabilities_(a_.keys, chunk_), d_scores_(a_.keys, chunk_),
        d_scores_by_query_(chunk_, a_.keys), key_rows_(a_.keys, a_.width), query_columns_(a_.width, chunk_),
        d_out_columns_(a_.width, chunk_), query_rows_(chunk_, a_.width), d_out_rows_(chunk_, a_.width),
        d_key_(static_cast<size_t>(padded(a_.keys) * padded(a_.width))), d_value_(d_key_.size()) {}

  void run(int64_t b, int64_t h) {
    b_ = b;
    h_ = h;
    key_.fill(a_.key.at(b, h), a_.key.row, a_.keys, a_.width);
    value_.fill(a_.value.at(b, h), a_.value.row, a_.keys, a_.width);
    key_rows_.fill_rows(a_.key.at(b, h), a_.key.row, a_.keys, a_.width);
    std::fill(d_key_.begin(), d_key_.end(), 0.0f);
    std::fill(d_value_.begin(), d_value_.end(), 0.0f);
    for (int64_t query = 0; query < a_.queries; query += chunk_) {
      const int64_t count = std::min(chunk_, a_.queries - query);
      const int64_t keys = padded(a_.causal ? std::min(a_.keys, query + count) : a_.keys);
      load(query, count);
      for (int64_t key = 0; key < keys; key += kBlock)
        for (int64_t i = 0; i < count; i += kBlock) scores(query, i, std::min(kBlock, count - i), key);
      for (int64_t i = 0; i < count; i += kBlock) store_d_query(query, i, std::min(kBlock, count - i), keys);
      for (int64_t key = 0; key < keys; key += kBlock) {
        add(probabilities_, key, d_out_rows_, padded(count), d_value_.data());
        add(d_scores_, key, query_rows_, padded(count), d_key_.data());
      }
    }
    store(d_key_, a_.d_key);
    store(d_value_, a_.d_value);
  }

 private:
  void load(int64_t query, int64_t count) {
    const uint16_t* queries = a_.query.at(b_, h_) + query * a_.query.row;
    const uint16_t* d_outs = a_.d_out.at(b_, h_) + query * a_.d_out.row;
    const uint16_t* outs = a_.out.at(b_, h_) + query * a_.out.row;
    query_columns_.fill_columns(queries, a_.query.row, count, a_.width);
    d_out_columns_.fill_columns(d_outs, a_.d_out.row, count, a_.width);
    query_rows_.fill_rows(queries, a_.query.row, count, a_.width);
    d_out_rows_.fill_rows(d_outs, a_.d_out.row, count, a_.width);
    const float* sums = a_.sums.data + b_ * a_.sums.batch + h_ * a_.sums.head + query * a_.sums.query;
    for (int64_t i = 0; i < count; ++i) {
      float product = 0.0f;
      for (int64_t d = 0; d < a_.width; ++d)
        product += amp::load(Bf16{d_outs[i * a_.d_out.row + d]}) * amp::load(Bf16{outs[i * a_.out.row + d]});
      products_[i] = product;
      sums_[i] = sums[i * a_.sums.query];
    }
  }

  // Probabilities and gradients of the scores of 32 keys and up to 32 queries of the chunk.
  void scores(int64_t query, int64_t i, int64_t count, int64_t key) {
    alignas(64) float s[kBlock * kBlock], d_p[kBlock * kBlock], added[kBlock][kBlock] = {};
    uint16_t by_query[kBlock][kBlock];
    key_.times(key, query_columns_.columns(i), query_columns_.tile(), padded(a_.width), s);
    value_.times(key, d_out_columns_.columns(i), d_out_columns_.tile(), padded(a_.width), d_p);
    if (a_.mask.data != nullptr) read_mask(query + i, key, added);
    for (int64_t k = 0; k < kBlock; ++k) {
      const int64_t there = key + k < a_.keys ? count : 0;
      const int64_t first = a_.causal ? std::clamp(key + k - query - i, int64_t{0}, there) : 0;  // the first that sees it
      const uint16_t* d_scores = row(s + k * kBlock, d_p + k * kBlock, added[k], i, first, there, key + k);
      for (int64_t j = 0; j < kBlock; ++j) by_query[j][k] = d_scores[j];
    }
    for (int64_t j = 0; j < kBlock; ++j) std::memcpy(d_scores_by_query_.row(i + j) + key, by_query[j], sizeof by_query[j]);
  }

  // One key and 32 queries, of which [first, last) see it. Returns the gradients of their scores.
  const uint16_t* row(const float* s, const float* d_p, const float* added, int64_t i, int64_t first, int64_t last,
                      int64_t key) {
    float p[kBlock] = {}, d_s[kBlock] = {};
    const float scale = scale_;
    const float *sums = sums_ + i, *products = products_ + i;
#pragma omp simd
    for (int64_t j = first; j < last; ++j) {
      const float score = s[j] * scale + added[j], x = score - sums[j];
      const float e = exponential(x);
      p[j] = (x < -87.0f || score == -INFINITY) ? 0.0f : e;
      d_s[j] = p[j] * (d_p[j] - products[j]) * scale;
    }
    uint16_t* d_scores = d_scores_.row(key) + i;
    narrow(p, reinterpret_cast<Bf16*>(probabilities_.row(key) + i), kBlock);
    narrow(d_s, reinterpret_cast<Bf16*>(d_scores), kBlock);
    return d_scores;
  }

  void read_mask(int64_t query, int64_t key, float (*added)[kBlock]) const {
    const Mask& mask = a_.mask;
    const int64_t start = b_ * mask.batch + h_ * mask.head + query * mask.query + key * mask.key;
    for (int64_t k = 0; k < std::min(kBlock, a_.keys - key); ++k)
      for (int64_t j = 0; j < std::min(kBlock, a_.queries - query); ++j) {
        const int64_t place = start + j * mask.query + k * mask.key;
        added[k][j] = mask.type == kFloat ? static_cast<const float*>(mask.data)[place]
                                          : amp::load(static_cast<const Bf16*>(mask.data)[place]);
      }
  }

  void store_d_query(int64_t query, int64_t i, int64_t count, int64_t keys) {
    alignas(64) float product[kBlock * kBlock];
    for (int64_t d = 0; d < a_.width; d += kBlock) {
      d_scores_by_query_.times(i, key_rows_.columns(d), key_rows_.tile(), keys, product);
      for (int64_t j = 0; j < count; ++j)
        narrow_line(product + j * kBlock, std::min(kBlock, a_.width - d), low(a_.d_query, query + i + j) + d);
    }
  }

  // Adds the product of 32 keys' rows with the chunk's rows to their gradients.
  void add(const Left& left, int64_t key, const Right& right, int64_t inner, float* sums) {
    alignas(64) float product[kBlock * kBlock];
    const int64_t width = padded(a_.width);
    for (int64_t d = 0; d < a_.width; d += kBlock) {
      left.times(key, right.columns(d), right.tile(), inner, product);
      for (int64_t k = 0; k < kBlock; ++k)
        for (int64_t j = 0; j < kBlock; ++j) sums[(key + k) * width + d + j] += product[k * kBlock + j];
    }
  }

  void store(const std::vector<float>& sums, const Heads& target) const {
    for (int64_t key = 0; key < a_.keys; ++key)
      narrow(sums.data() + key * padded(a_.width), low(target, key), a_.width);
  }

  Bf16* low(const Heads& heads, int64_t row) const {
    return reinterpret_cast<Bf16*>(heads.at(b_, h_) + row * heads.row);
  }

  const Attention& a_;
  const float scale_;
  const int64_t chunk_;
  Left key_, value_, probabilities_, d_scores_, d_scores_by_query_;
  Right key_rows_, query_columns_, d_out_columns_, query_rows_, d_out_rows_;
  std::vector<float> d_key_, d_value_;
  float sums_[kChunk];
  float products_[kChunk];  // of the output and its gradient: what the softmax's backward takes off
  int64_t b_ = 0, h_ = 0;
};

}  // namespace

extern "C" {

// Gradients of attention = softmax(scale * query key^T + mask) value by query, key and value.
void amp_attention_backward(const Attention* attention, float scale, int threads) {
  const int64_t heads = attention->batch * attention->heads;
#pragma omp parallel num_threads(threads)
  {
    const TileShape shape;
    HeadBackward backward(*attention, scale);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < heads; ++i) backward.run(i / attention->heads, i % attention->heads);
  }
}

}  // extern "C"
