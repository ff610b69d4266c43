// One direction of one bf16 LSTM layer on a CPU, forward and backward through time.
//
// Sums and the cell state are fp32; the hidden state, the gates that the backward needs and its results are bf16.

#include "math.h"
#include "recurrent.h"
#include "team.h"

namespace {

using namespace amp;

constexpr int kGates = 4;  // input, forget, cell, output: torch's order

// What the forward leaves for the backward, per step: gates [4][hidden][batch] bf16, cell states [hidden][batch] fp32.
struct Memory {
  Bf16* gates;
  float* cells;
};

// The four gates of 32 units for up to 32 columns of the batch: [gate][unit][column].
using Sums = float[kGates][kBlock * kBlock];

class Forward : Loops {
 public:
  Forward(const Shape& shape, const uint16_t* const* inputs, uint16_t* const* outputs, Memory memory, int threads)
      : Loops(shape, threads), memory_(memory), data_(inputs[0]), w_ih_(inputs[1]), w_hh_(inputs[2]), b_ih_(inputs[3]),
        b_hh_(inputs[4]), h_(inputs[5]), c_(inputs[6]), out_(outputs[0]), h_last_(outputs[1]), c_last_(outputs[2]),
        x_{Columns(s_.features, s_.batch), Columns(s_.features, s_.batch)},
        hidden_{Columns(s_.hidden, s_.batch), Columns(s_.hidden, s_.batch)} {}

  void run() {
    with_team(threads_, [&](int mine, int count, Meeting& meeting) {
      x_[0].fill(step_data(0), mine, count);
      hidden_[0].fill(h_, mine, count);
      meeting.wait();
      for (int64_t step = 0; step < s_.steps; ++step) {
        for_blocks(mine, count, [&](int64_t unit, int64_t column) { block_of(step, unit, column); });
        if (step + 1 < s_.steps) x_[(step + 1) % 2].fill(step_data(step + 1), mine, count);
        meeting.wait();
      }
    });
  }

 private:
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

  const Memory memory_;
  const uint16_t *data_, *w_ih_, *w_hh_, *b_ih_, *b_hh_, *h_, *c_;
  uint16_t *out_, *h_last_, *c_last_;
  Columns x_[2], hidden_[2];
};

// Gradients of the gates before their functions, [steps, batch, 4 * hidden], and of the first states.
class Backward : Loops {
 public:
  Backward(const Shape& shape, const uint16_t* const* inputs, uint16_t* const* outputs, Memory memory, int threads)
      : Loops(shape, threads), memory_(memory), w_hh_(inputs[0]), c_(inputs[1]), d_out_(inputs[2]), d_h_(inputs[3]),
        d_c_(inputs[4]), d_gates_(outputs[0]), d_h_first_(outputs[1]), d_c_first_(outputs[2]),
        weight_(static_cast<size_t>(kGates * s_.hidden * s_.hidden)),
        columns_{Columns(kGates * s_.hidden, s_.batch), Columns(kGates * s_.hidden, s_.batch)},
        d_cells_(static_cast<size_t>(s_.hidden * s_.batch)) {}

  void run() {
    with_team(threads_, [&](int mine, int count, Meeting& meeting) {
      for_units(mine, count, [&](int64_t unit) {
        transpose(w_hh_, kGates * s_.hidden, s_.hidden, unit, weight_.data());
      });
      for (int64_t step = s_.steps - 1; step >= -1; --step) {  // the last turn gives the first hidden state's gradient
        if (step + 1 < s_.steps) meeting.wait();
        for_blocks(mine, count, [&](int64_t unit, int64_t column) { block_of(step, unit, column); });
      }
    });
  }

 private:
  void block_of(int64_t step, int64_t unit, int64_t column) {
    alignas(64) float sums[kBlock * kBlock] = {};
    const int64_t width = kGates * s_.hidden, columns = std::min(kBlock, s_.batch - column);
    if (step + 1 < s_.steps) {
      const Operand one = operand(weight_.data(), width, unit, columns_[(step + 1) % 2], column);
      block(&one, 1, columns > kTile, sums);
    }
    Lines d_out, made[kGates];
    if (step >= 0)
      for (int64_t j = 0; j < columns; ++j)
        std::memcpy(d_out[j], d_out_ + row_of(step, column + j) + unit, sizeof d_out[j]);
    for (int64_t u = 0; u < kBlock; ++u) cell(step, unit + u, u, column, columns, sums + u * kBlock, d_out, made);
    for (int64_t gate = 0; step >= 0 && gate < kGates; ++gate)
      for (int64_t j = 0; j < columns; ++j)
        std::memcpy(d_gates_ + kGates * row_of(step, column + j) + gate * s_.hidden + unit, made[gate][j],
                    sizeof made[gate][j]);
  }

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

  const Memory memory_;
  const uint16_t *w_hh_, *c_, *d_out_, *d_h_, *d_c_;
  uint16_t *d_gates_, *d_h_first_, *d_c_first_;
  std::vector<uint16_t> weight_;
  Columns columns_[2];
  std::vector<float> d_cells_;
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
