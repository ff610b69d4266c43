// One direction of one bf16 LSTM layer on a CPU, forward and backward through time.
//
// Everything is kept transposed, units before batch: then the weights are the left factor of every matrix product, lie in
// memory as the processor wants them, and are read where they are. Sums and the cell state are fp32; the hidden state,
// the gates that the backward needs and its results are bf16. Threads share the units and meet once per step.

#include <omp.h>

#include <atomic>
#include <deque>
#include <thread>
#include <vector>

#include "cpu_product.h"
#include "cpu_types.h"

namespace {

using namespace amp;

constexpr int kGates = 4;  // input, forget, cell, output: torch's order

struct Shape {
  int64_t steps, batch, features, hidden, reverse;
};

// What the forward leaves for the backward, per step: gates [4][hidden][batch] bf16, cell states [hidden][batch] fp32.
struct Memory {
  Bf16* gates;
  float* cells;
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
  int64_t inner() const { return inner_; }

  // From rows [batch][inner], for inner elements [first, last).
  void fill(const uint16_t* rows, int64_t first, int64_t last) {
    for (int64_t b = 0; b < batch_; ++b)
      for (int64_t m = first; m < last; m += 2) std::memcpy(at(m, b), rows + b * inner_ + m, 2 * sizeof(uint16_t));
  }

 private:
  int64_t inner_, batch_;
  std::vector<uint16_t> values_;
};

// Threads that wait for each other for a microsecond or two should not be put to sleep; after that they may.
class Meeting {
 public:
  explicit Meeting(int threads) : threads_(threads) {}

  void wait() {
    const int round = round_.load(std::memory_order_acquire);
    if (here_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      here_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int turn = 0; round_.load(std::memory_order_acquire) == round; ++turn)
      if (turn > 4000) std::this_thread::yield();
  }

 private:
  const int threads_;
  std::atomic<int> here_{0}, round_{0};
};

// exp(x) to about one unit in the last place: 2^n times a polynomial (Cephes' expf), written so that loops vectorise.
inline float exponential(float x) {
  x = std::min(std::max(x, -87.0f), 88.0f);
  const float n = std::nearbyint(x * 1.44269504f);
  const float r = __builtin_fmaf(n, 2.12194440e-4f, __builtin_fmaf(n, -0.693359375f, x));
  float p = 1.9875691500e-4f;
  p = __builtin_fmaf(p, r, 1.3981999507e-3f);
  p = __builtin_fmaf(p, r, 8.3334519073e-3f);
  p = __builtin_fmaf(p, r, 4.1665795894e-2f);
  p = __builtin_fmaf(p, r, 1.6666665459e-1f);
  p = __builtin_fmaf(p, r, 5.0000001201e-1f);
  p = __builtin_fmaf(p, r * r, r) + 1.0f;
  const int32_t power = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &power, sizeof scale);
  return p * scale;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

inline float hyperbolic(float x) {  // tanh; near 0, where the quotient loses digits, by its series
  const float square = x * x;
  float series = __builtin_fmaf(square, -17.0f / 315.0f, 2.0f / 15.0f);
  series = __builtin_fmaf(series, square, -1.0f / 3.0f);
  series = __builtin_fmaf(series * square, x, x);
  const float quotient = 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);
  return square < 0.04f ? series : (x != x ? x : quotient);
}

Operand operand(const uint16_t* weight, int64_t width, int64_t row, const Columns& columns, int64_t column) {
  return {weight + row * width, width, kDepth, kTile * width, columns.tile(column), columns.tile_size(), width};
}

// The four gates of 32 units for up to 32 columns of the batch: [gate][unit][column].
using Sums = float[kGates][kBlock * kBlock];

// 32 units for up to 32 columns of the batch, as the batch-first tensors outside have them: whole lines of the cache.
using Lines = uint16_t[kBlock][kBlock];

float bias_of(const uint16_t* one, const uint16_t* other, int64_t unit) {
  return load(Bf16{one[unit]}) + load(Bf16{other[unit]});
}

class Forward {
 public:
  Forward(const Shape& shape, const uint16_t* const* inputs, uint16_t* const* outputs, Memory memory, int threads)
      : s_(shape), data_(inputs[0]), w_ih_(inputs[1]), w_hh_(inputs[2]), b_ih_(inputs[3]), b_hh_(inputs[4]),
        h_(inputs[5]), c_(inputs[6]), out_(outputs[0]), h_last_(outputs[1]), c_last_(outputs[2]), memory_(memory),
        threads_(threads), x_{Columns(s_.features, s_.batch), Columns(s_.features, s_.batch)},
        hidden_{Columns(s_.hidden, s_.batch), Columns(s_.hidden, s_.batch)} {}

  void run() {
    const int64_t units = s_.hidden / kBlock;
#pragma omp parallel num_threads(threads_)
    {
      const int count = omp_get_num_threads(), mine = omp_get_thread_num();
#pragma omp single
      meeting_.emplace_back(count);
      const TileShape tile_shape;
      share(0, s_.features, mine, count, [&](int64_t a, int64_t b) { x_[0].fill(step_data(0), a, b); });
      share(0, s_.hidden, mine, count, [&](int64_t a, int64_t b) { hidden_[0].fill(h_, a, b); });
      meeting_[0].wait();
      for (int64_t step = 0; step < s_.steps; ++step) {
        for (int64_t unit = mine; unit < units; unit += count)
          for (int64_t column = 0; column < s_.batch; column += kBlock) block_of(step, unit * kBlock, column);
        if (step + 1 < s_.steps)
          share(0, s_.features, mine, count,
                [&](int64_t a, int64_t b) { x_[(step + 1) % 2].fill(step_data(step + 1), a, b); });
        meeting_[0].wait();
      }
    }
  }

 private:
  template <class Body>
  static void share(int64_t first, int64_t last, int mine, int count, const Body& body) {  // in tiles of 32
    const int64_t each = tiles(tiles(last - first, kDepth), count) * kDepth;
    body(std::min(last, first + mine * each), std::min(last, first + (mine + 1) * each));
  }

  int64_t time(int64_t step) const { return s_.reverse ? s_.steps - 1 - step : step; }
  const uint16_t* step_data(int64_t step) const { return data_ + time(step) * s_.batch * s_.features; }

  void block_of(int64_t step, int64_t unit, int64_t column) {
    alignas(64) Sums sums;
    const int64_t columns = std::min(kBlock, s_.batch - column);
    for (int gate = 0; gate < kGates; ++gate) {
      const int64_t row = gate * s_.hidden + unit;
      const Operand both[2] = {operand(w_ih_, s_.features, row, x_[step % 2], column),
                               operand(w_hh_, s_.hidden, row, hidden_[step % 2], column)};
      block(both, 2, columns > kTile, sums[gate]);
    }
    Lines out;
    for (int64_t u = 0; u < kBlock; ++u) cell(step, unit + u, u, column, columns, sums, out);
    for (int64_t j = 0; j < columns; ++j)
      std::memcpy(out_ + (time(step) * s_.batch + column + j) * s_.hidden + unit, out[j], sizeof out[j]);
  }

  void cell(int64_t step, int64_t unit, int64_t u, int64_t column, int64_t columns, const Sums& sums, Lines& out) {
    const int64_t states = s_.hidden * s_.batch, place = unit * s_.batch + column;
    Bf16* gates = memory_.gates + step * kGates * states + place;
    float* cells = memory_.cells + step * states + place;
    float bias[kGates], before[kBlock], hidden[kBlock];
    for (int gate = 0; gate < kGates; ++gate) bias[gate] = bias_of(b_ih_, b_hh_, gate * s_.hidden + unit);
    for (int64_t j = 0; j < columns; ++j)
      before[j] = step == 0 ? load(Bf16{c_[(column + j) * s_.hidden + unit]}) : cells[j - states];
    const float *in = sums[0] + u * kBlock, *forget = sums[1] + u * kBlock, *new_cell = sums[2] + u * kBlock,
                *output = sums[3] + u * kBlock;
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) {
      const float i = sigmoid(in[j] + bias[0]), f = sigmoid(forget[j] + bias[1]);
      const float g = hyperbolic(new_cell[j] + bias[2]), o = sigmoid(output[j] + bias[3]);
      const float c = f * before[j] + i * g;
      store(i, gates + j);
      store(f, gates + states + j);
      store(g, gates + 2 * states + j);
      store(o, gates + 3 * states + j);
      cells[j] = c;
      hidden[j] = o * hyperbolic(c);
    }
    for (int64_t j = 0; j < columns; ++j) {
      Bf16 h;
      store(hidden[j], &h);
      const int64_t b = column + j;
      out[j][u] = h.bits;
      if (step + 1 < s_.steps) {
        *hidden_[(step + 1) % 2].at(unit, b) = h.bits;
      } else {
        Bf16 c;
        store(cells[j], &c);
        h_last_[b * s_.hidden + unit] = h.bits;
        c_last_[b * s_.hidden + unit] = c.bits;
      }
    }
  }

  const Shape s_;
  const uint16_t *data_, *w_ih_, *w_hh_, *b_ih_, *b_hh_, *h_, *c_;
  uint16_t *out_, *h_last_, *c_last_;
  Memory memory_;
  int threads_;
  Columns x_[2], hidden_[2];
  std::deque<Meeting> meeting_;
};

// Gradients of the gates before their functions, [steps, batch, 4 * hidden], and of the first states.
class Backward {
 public:
  Backward(const Shape& shape, const uint16_t* const* inputs, uint16_t* const* outputs, Memory memory, int threads)
      : s_(shape), w_hh_(inputs[0]), c_(inputs[1]), d_out_(inputs[2]), d_h_(inputs[3]), d_c_(inputs[4]),
        d_gates_(outputs[0]), d_h_first_(outputs[1]), d_c_first_(outputs[2]), memory_(memory), threads_(threads),
        weight_(static_cast<size_t>(kGates * s_.hidden * s_.hidden)),
        columns_{Columns(kGates * s_.hidden, s_.batch), Columns(kGates * s_.hidden, s_.batch)},
        d_cells_(static_cast<size_t>(s_.hidden * s_.batch)) {}

  void run() {
    const int64_t units = s_.hidden / kBlock;
#pragma omp parallel num_threads(threads_)
    {
      const int count = omp_get_num_threads(), mine = omp_get_thread_num();
#pragma omp single
      meeting_.emplace_back(count);
      const TileShape tile_shape;
      for (int64_t unit = mine; unit < units; unit += count) transpose(unit * kBlock);
      for (int64_t step = s_.steps; step-- > -1;) {  // the last turn gives the first hidden state's gradient
        if (step + 1 < s_.steps) meeting_[0].wait();
        for (int64_t unit = mine; unit < units; unit += count)
          for (int64_t column = 0; column < s_.batch; column += kBlock) block_of(step, unit * kBlock, column);
        if (step < 0) break;
      }
    }
  }

 private:
  int64_t time(int64_t step) const { return s_.reverse ? s_.steps - 1 - step : step; }

  // The recurrent weight of 32 units, [unit][gate rows], from [gate rows][unit].
  void transpose(int64_t unit) {
    const int64_t width = kGates * s_.hidden;
    for (int64_t row = 0; row < width; row += kBlock) {
      Lines lines;
      for (int64_t r = 0; r < kBlock; ++r)
        for (int64_t u = 0; u < kBlock; ++u) lines[u][r] = w_hh_[(row + r) * s_.hidden + unit + u];
      for (int64_t u = 0; u < kBlock; ++u)
        std::memcpy(weight_.data() + (unit + u) * width + row, lines[u], sizeof lines[u]);
    }
  }

  void block_of(int64_t step, int64_t unit, int64_t column) {
    alignas(64) float sums[kBlock * kBlock] = {};
    const int64_t width = kGates * s_.hidden, columns = std::min(kBlock, s_.batch - column);
    if (step + 1 < s_.steps) {
      const Operand one = operand(weight_.data(), width, unit, columns_[(step + 1) % 2], column);
      block(&one, 1, columns > kTile, sums);
    }
    Lines d_out, made[kGates];
    if (step >= 0)
      for (int64_t j = 0; j < columns; ++j) std::memcpy(d_out[j], d_out_ + row_of(step, column + j) + unit, sizeof d_out[j]);
    for (int64_t u = 0; u < kBlock; ++u) cell(step, unit + u, u, column, columns, sums + u * kBlock, d_out, made);
    for (int64_t gate = 0; step >= 0 && gate < kGates; ++gate)
      for (int64_t j = 0; j < columns; ++j)
        std::memcpy(d_gates_ + kGates * row_of(step, column + j) + gate * s_.hidden + unit, made[gate][j],
                    sizeof made[gate][j]);
  }

  int64_t row_of(int64_t step, int64_t b) const { return (time(step) * s_.batch + b) * s_.hidden; }

  void cell(int64_t step, int64_t unit, int64_t u, int64_t column, int64_t columns, float* d_hidden,
            const Lines& d_outs, Lines* lines) {
    const int64_t states = s_.hidden * s_.batch, place = unit * s_.batch + column;
    float* d_cell = d_cells_.data() + place;
    if (step + 1 == s_.steps)
      for (int64_t j = 0; j < columns; ++j) {
        d_hidden[j] = load(Bf16{d_h_[(column + j) * s_.hidden + unit]});
        d_cell[j] = load(Bf16{d_c_[(column + j) * s_.hidden + unit]});
      }
    if (step < 0) {
      for (int64_t j = 0; j < columns; ++j) {
        store(d_hidden[j], reinterpret_cast<Bf16*>(d_h_first_) + (column + j) * s_.hidden + unit);
        store(d_cell[j], reinterpret_cast<Bf16*>(d_c_first_) + (column + j) * s_.hidden + unit);
      }
      return;
    }
    const Bf16* gates = memory_.gates + step * kGates * states + place;
    const float* cells = memory_.cells + step * states + place;
    float before[kBlock], d_out[kBlock];
    Bf16 made[kGates][kBlock];
    for (int64_t j = 0; j < columns; ++j) {
      before[j] = step == 0 ? load(Bf16{c_[(column + j) * s_.hidden + unit]}) : cells[j - states];
      d_out[j] = load(Bf16{d_outs[j][u]});
    }
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) {
      const float i = load(gates[j]), f = load(gates[states + j]), g = load(gates[2 * states + j]);
      const float o = load(gates[3 * states + j]), t = hyperbolic(cells[j]);
      const float d_h = d_hidden[j] + d_out[j], d_c = d_cell[j] + d_h * o * (1.0f - t * t);
      store(d_c * g * i * (1.0f - i), &made[0][j]);
      store(d_c * before[j] * f * (1.0f - f), &made[1][j]);
      store(d_c * i * (1.0f - g * g), &made[2][j]);
      store(d_h * t * o * (1.0f - o), &made[3][j]);
      d_cell[j] = d_c * f;
    }
    for (int64_t gate = 0; gate < kGates; ++gate)
      for (int64_t j = 0; j < columns; ++j) {
        lines[gate][j][u] = made[gate][j].bits;
        *columns_[step % 2].at(gate * s_.hidden + unit, column + j) = made[gate][j].bits;
      }
  }

  const Shape s_;
  const uint16_t *w_hh_, *c_, *d_out_, *d_h_, *d_c_;
  uint16_t *d_gates_, *d_h_first_, *d_c_first_;
  Memory memory_;
  int threads_;
  std::vector<uint16_t> weight_;
  Columns columns_[2];
  std::vector<float> d_cells_;
  std::deque<Meeting> meeting_;
};

}  // namespace

extern "C" {

// inputs: data, w_ih, w_hh, b_ih, b_hh, h, c; outputs: output, last h, last c. All bf16 and contiguous.
void amp_lstm_forward(const Shape* shape, const uint16_t* const* inputs, uint16_t* const* outputs, void* gates,
                      float* cells, int threads) {
  Forward(*shape, inputs, outputs, {static_cast<Bf16*>(gates), cells}, threads).run();
}

// inputs: w_hh, c, gradients of the three outputs; outputs: gradients of the gates, of h, of c.
void amp_lstm_backward(const Shape* shape, const uint16_t* const* inputs, uint16_t* const* outputs, void* gates,
                       float* cells, int threads) {
  Backward(*shape, inputs, outputs, {static_cast<Bf16*>(gates), cells}, threads).run();
}

}  // extern "C"
