// One direction of one bf16 recurrent layer (LSTM, GRU or plain) on a CPU, forward and backward through time.
//
// Sums, gates and what is carried from step to step are fp32. What is rounded to bf16 is the hidden state as it goes
// into the next product, the gates that the backward needs, and the results.

#include "math.h"
#include "recurrent.h"

namespace {

using namespace amp;

// What the forward leaves for the backward, per step: values of the cell [kKept][hidden][batch] bf16, and what it
// carries to the next step [hidden][batch] fp32: the cell state of an LSTM, else the hidden state.
struct Memory {
  Bf16* gates;
  float* states;
};

// A cell computes one unit for some columns of the batch. `forward` takes the sums of its gates to the state that is
// carried and the hidden state. `backward` takes the gradient of the hidden state, by the next step's products and by
// the output, and that of what is carried, to those of the sums and of what was carried to this step.
struct OneSum {  // a gate has one sum, of what comes from the data and from the state
  static constexpr int gate(int sum) { return sum; }
  static constexpr bool reads_data(int) { return true; }
  static constexpr bool reads_state(int) { return true; }
  static constexpr int of_data(int gate) { return gate; }  // which of the gradients of the sums goes to the data
  static constexpr int of_state(int gate) { return gate; }
};

struct Lstm : OneSum {
  static constexpr bool kCell = true;              // carries a cell state
  static constexpr int kGates = 4;                 // input, forget, cell, output: torch's order
  static constexpr int kSums = kGates, kKept = 4;  // all of them

  static void forward(const float* const* sums, const float* bias, const float* before, int64_t columns, Bf16* gates,
                      int64_t stride, float* state, float* hidden) {
    const float *in = sums[0], *forget = sums[1], *new_cell = sums[2], *output = sums[3];
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) {
      const float i = sigmoid(in[j] + bias[0]), f = sigmoid(forget[j] + bias[1]);
      const float g = hyperbolic(new_cell[j] + bias[2]), o = sigmoid(output[j] + bias[3]);
      const float c = f * before[j] + i * g;
      store(i, gates + j);
      store(f, gates + stride + j);
      store(g, gates + 2 * stride + j);
      store(o, gates + 3 * stride + j);
      state[j] = c;
      hidden[j] = o * hyperbolic(c);
    }
  }

  static void backward(const Bf16* gates, int64_t stride, const float* before, const float* state, int64_t columns,
                       const float* d_hidden, const float* d_out, float* carried, Bf16 (*d_gates)[kBlock]) {
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) {
      const float i = load(gates[j]), f = load(gates[stride + j]), g = load(gates[2 * stride + j]);
      const float o = load(gates[3 * stride + j]), t = hyperbolic(state[j]);
      const float d_h = d_hidden[j] + d_out[j], d_c = carried[j] + d_h * o * (1.0f - t * t);
      store(d_c * g * i * (1.0f - i), &d_gates[0][j]);
      store(d_c * before[j] * f * (1.0f - f), &d_gates[1][j]);
      store(d_c * i * (1.0f - g * g), &d_gates[2][j]);
      store(d_h * t * o * (1.0f - o), &d_gates[3][j]);
      carried[j] = d_c * f;
    }
  }
};

// h' = z h + (1 - z) n, where r and z are sigmoids of their sums and n = tanh(data + r state): the third gate has a sum
// of what comes from the data and another one of what comes from the state.
struct Gru {
  static constexpr bool kCell = false;
  static constexpr int kGates = 3;  // reset, update, new: torch's order
  static constexpr int kSums = 4;   // reset, update, new from the data, new from the state
  static constexpr int kKept = 4;   // r, z, n, and the last sum

  static constexpr int gate(int sum) { return std::min(sum, 2); }
  static constexpr bool reads_data(int sum) { return sum != 3; }
  static constexpr bool reads_state(int sum) { return sum != 2; }
  static constexpr int of_data(int gate) { return gate; }
  static constexpr int of_state(int gate) { return gate == 2 ? 3 : gate; }

  static void forward(const float* const* sums, const float* bias, const float* before, int64_t columns, Bf16* gates,
                      int64_t stride, float* state, float* hidden) {
    const float *reset = sums[0], *update = sums[1], *data = sums[2], *last = sums[3];
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) {
      const float r = sigmoid(reset[j] + bias[0]), z = sigmoid(update[j] + bias[1]), h = last[j] + bias[3];
      const float n = hyperbolic(data[j] + bias[2] + r * h);
      store(r, gates + j);
      store(z, gates + stride + j);
      store(n, gates + 2 * stride + j);
      store(h, gates + 3 * stride + j);
      hidden[j] = state[j] = n + z * (before[j] - n);
    }
  }

  static void backward(const Bf16* gates, int64_t stride, const float* before, const float*, int64_t columns,
                       const float* d_hidden, const float* d_out, float* carried, Bf16 (*d_gates)[kBlock]) {
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) {
      const float r = load(gates[j]), z = load(gates[stride + j]), n = load(gates[2 * stride + j]);
      const float h = load(gates[3 * stride + j]), d = d_hidden[j] + carried[j] + d_out[j];
      const float d_new = d * (1.0f - z) * (1.0f - n * n);
      store(d_new * h * r * (1.0f - r), &d_gates[0][j]);
      store(d * (before[j] - n) * z * (1.0f - z), &d_gates[1][j]);
      store(d_new, &d_gates[2][j]);
      store(d_new * r, &d_gates[3][j]);
      carried[j] = d * z;
    }
  }
};

struct Tanh {
  static float of(float x) { return hyperbolic(x); }
  static float gradient(float d, float y) { return d * (1.0f - y * y); }
};

struct Relu {
  static float of(float x) { return x < 0.0f ? 0.0f : x; }  // a NaN stays one
  static float gradient(float d, float y) { return y <= 0.0f ? 0.0f : d; }
};

template <class Function>
struct Plain : OneSum {
  static constexpr bool kCell = false;
  static constexpr int kGates = 1, kSums = 1, kKept = 0;

  static void forward(const float* const* sums, const float* bias, const float*, int64_t columns, Bf16*, int64_t,
                      float* state, float* hidden) {
    const float* sum = sums[0];
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) hidden[j] = state[j] = Function::of(sum[j] + bias[0]);
  }

  static void backward(const Bf16*, int64_t, const float*, const float* state, int64_t columns, const float* d_hidden,
                       const float* d_out, float*, Bf16 (*d_gates)[kBlock]) {
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) store(Function::gradient(d_hidden[j] + d_out[j], state[j]), &d_gates[0][j]);
  }
};

template <class Cell>
class Forward : Loops {
 public:
  Forward(const Shape& shape, const uint16_t* const* inputs, uint16_t* const* outputs, Memory memory, int threads)
      : Loops(shape, threads), memory_(memory), data_(inputs[0]), w_ih_(inputs[1]), w_hh_(inputs[2]), b_ih_(inputs[3]),
        b_hh_(inputs[4]), h_(inputs[5]), carried_(Cell::kCell ? inputs[6] : inputs[5]), out_(outputs[0]),
        h_last_(outputs[1]), c_last_(outputs[2]), x_{Columns(s_.features, s_.batch), Columns(s_.features, s_.batch)},
        hidden_{Columns(s_.hidden, s_.batch), Columns(s_.hidden, s_.batch)} {}

  void run() {
    this->with_team([&](int mine, int count) {
      x_[0].fill(step_data(0), mine, count);
      hidden_[0].fill(h_, mine, count);
#pragma omp barrier
      for (int64_t step = 0; step < s_.steps; ++step) {
        for_blocks(mine, count, [&](int64_t unit, int64_t column) { block_of(step, unit, column); });
        if (step + 1 < s_.steps) x_[(step + 1) % 2].fill(step_data(step + 1), mine, count);
#pragma omp barrier
      }
    });
  }

 private:
  const uint16_t* step_data(int64_t step) const { return data_ + time(step) * s_.batch * s_.features; }

  void block_of(int64_t step, int64_t unit, int64_t column) {
    alignas(64) float sums[Cell::kSums][kBlock * kBlock];
    const int64_t columns = std::min(kBlock, s_.batch - column);
    for (int sum = 0; sum < Cell::kSums; ++sum) {
      const int64_t row = Cell::gate(sum) * s_.hidden + unit;
      Operand both[2];
      int count = 0;
      if (Cell::reads_data(sum)) both[count++] = operand(w_ih_, s_.features, row, x_[step % 2], column);
      if (Cell::reads_state(sum)) both[count++] = operand(w_hh_, s_.hidden, row, hidden_[step % 2], column);
      block(both, count, columns > kTile, sums[sum]);
    }
    Lines out;
    for (int64_t u = 0; u < kBlock; ++u) {
      const float* lines[Cell::kSums];
      for (int sum = 0; sum < Cell::kSums; ++sum) lines[sum] = sums[sum] + u * kBlock;
      cell(step, unit + u, u, column, columns, lines, out);
    }
    for (int64_t j = 0; j < columns; ++j)
      std::memcpy(out_ + row_of(step, column + j) + unit, out[j], sizeof out[j]);
  }

  void cell(int64_t step, int64_t unit, int64_t u, int64_t column, int64_t columns, const float* const* sums,
            Lines& out) {
    const int64_t stride = s_.hidden * s_.batch, place = unit * s_.batch + column;
    float* states = memory_.states + step * stride + place;
    float bias[Cell::kSums], before[kBlock], hidden[kBlock];
    for (int sum = 0; sum < Cell::kSums; ++sum) {
      const int64_t row = Cell::gate(sum) * s_.hidden + unit;
      bias[sum] = Cell::reads_data(sum) ? load(Bf16{b_ih_[row]}) : 0.0f;
      if (Cell::reads_state(sum)) bias[sum] += load(Bf16{b_hh_[row]});
    }
    for (int64_t j = 0; j < columns; ++j)
      before[j] = step == 0 ? load(Bf16{carried_[(column + j) * s_.hidden + unit]}) : states[j - stride];
    Bf16* gates = memory_.gates + step * Cell::kKept * stride + place;
    Cell::forward(sums, bias, before, columns, gates, stride, states, hidden);
    for (int64_t j = 0; j < columns; ++j) {
      Bf16 h;
      store(hidden[j], &h);
      const int64_t b = column + j;
      out[j][u] = h.bits;
      if (step + 1 < s_.steps) {
        *hidden_[(step + 1) % 2].at(unit, b) = h.bits;
      } else {
        h_last_[b * s_.hidden + unit] = h.bits;
        if (Cell::kCell) store(states[j], reinterpret_cast<Bf16*>(c_last_) + b * s_.hidden + unit);
      }
    }
  }

  const Memory memory_;
  const uint16_t *data_, *w_ih_, *w_hh_, *b_ih_, *b_hh_, *h_, *carried_;
  uint16_t *out_, *h_last_, *c_last_;
  Columns x_[2], hidden_[2];
};

// Gradients of the first states, and of the sums, as the products with the data and those with the state want them,
// [steps, batch, gates * hidden] each (one tensor where they are the same).
template <class Cell>
class Backward : Loops {
 public:
  Backward(const Shape& shape, const uint16_t* const* inputs, uint16_t* const* outputs, Memory memory, int threads)
      : Loops(shape, threads), memory_(memory), w_hh_(inputs[0]), first_(inputs[1]), d_out_(inputs[2]),
        d_h_(inputs[3]), d_c_(inputs[4]), d_h_first_(outputs[0]), d_c_first_(outputs[1]), d_data_(outputs[2]),
        d_state_(outputs[3]), weight_(static_cast<size_t>(kWidth * s_.hidden * s_.hidden)),
        columns_{Columns(kWidth * s_.hidden, s_.batch), Columns(kWidth * s_.hidden, s_.batch)},
        carried_(static_cast<size_t>(s_.hidden * s_.batch)) {}

  void run() {
    this->with_team([&](int mine, int count) {
      for_units(mine, count, [&](int64_t unit) {
        transpose(w_hh_, kWidth * s_.hidden, s_.hidden, unit, weight_.data());
      });
      for (int64_t step = s_.steps - 1; step >= -1; --step) {  // the last turn gives the first states' gradients
        if (step + 1 < s_.steps) {
#pragma omp barrier
        }
        for_blocks(mine, count, [&](int64_t unit, int64_t column) { block_of(step, unit, column); });
      }
    });
  }

 private:
  static constexpr int kWidth = Cell::kGates;

  void block_of(int64_t step, int64_t unit, int64_t column) {
    alignas(64) float sums[kBlock * kBlock] = {};
    const int64_t width = kWidth * s_.hidden, columns = std::min(kBlock, s_.batch - column);
    if (step + 1 < s_.steps) {
      const Operand one = operand(weight_.data(), width, unit, columns_[(step + 1) % 2], column);
      block(&one, 1, columns > kTile, sums);
    }
    Lines d_out, d_gates[Cell::kSums];
    if (step >= 0)
      for (int64_t j = 0; j < columns; ++j)
        std::memcpy(d_out[j], d_out_ + row_of(step, column + j) + unit, sizeof d_out[j]);
    for (int64_t u = 0; u < kBlock; ++u) cell(step, unit + u, u, column, columns, sums + u * kBlock, d_out, d_gates);
    for (int gate = 0; step >= 0 && gate < kWidth; ++gate)
      for (int64_t j = 0; j < columns; ++j) {
        const int64_t place = kWidth * row_of(step, column + j) + gate * s_.hidden + unit;
        std::memcpy(d_data_ + place, d_gates[Cell::of_data(gate)][j], sizeof d_gates[0][j]);
        if (d_state_ != d_data_) std::memcpy(d_state_ + place, d_gates[Cell::of_state(gate)][j], sizeof d_gates[0][j]);
      }
  }

  void cell(int64_t step, int64_t unit, int64_t u, int64_t column, int64_t columns, float* d_hidden,
            const Lines& d_outs, Lines* lines) {
    const int64_t stride = s_.hidden * s_.batch, place = unit * s_.batch + column;
    float* carried = carried_.data() + place;  // zeros at first
    if (step + 1 == s_.steps)
      for (int64_t j = 0; j < columns; ++j) {
        d_hidden[j] = load(Bf16{d_h_[(column + j) * s_.hidden + unit]});
        if (Cell::kCell) carried[j] = load(Bf16{d_c_[(column + j) * s_.hidden + unit]});
      }
    if (step < 0) {
      for (int64_t j = 0; j < columns; ++j) {
        const int64_t at = (column + j) * s_.hidden + unit;
        store(Cell::kCell ? d_hidden[j] : d_hidden[j] + carried[j], reinterpret_cast<Bf16*>(d_h_first_) + at);
        if (Cell::kCell) store(carried[j], reinterpret_cast<Bf16*>(d_c_first_) + at);
      }
      return;
    }
    const Bf16* gates = memory_.gates + step * Cell::kKept * stride + place;
    const float* states = memory_.states + step * stride + place;
    float before[kBlock], d_out[kBlock];
    Bf16 d_gates[Cell::kSums][kBlock];
    for (int64_t j = 0; j < columns; ++j) {
      before[j] = step == 0 ? load(Bf16{first_[(column + j) * s_.hidden + unit]}) : states[j - stride];
      d_out[j] = load(Bf16{d_outs[j][u]});
    }
    Cell::backward(gates, stride, before, states, columns, d_hidden, d_out, carried, d_gates);
    for (int sum = 0; sum < Cell::kSums; ++sum)
      for (int64_t j = 0; j < columns; ++j) lines[sum][j][u] = d_gates[sum][j].bits;
    for (int gate = 0; gate < kWidth; ++gate)
      for (int64_t j = 0; j < columns; ++j)
        *columns_[step % 2].at(gate * s_.hidden + unit, column + j) = d_gates[Cell::of_state(gate)][j].bits;
  }

  const Memory memory_;
  const uint16_t *w_hh_, *first_, *d_out_, *d_h_, *d_c_;
  uint16_t *d_h_first_, *d_c_first_, *d_data_, *d_state_;
  std::vector<uint16_t> weight_;
  Columns columns_[2];
  std::vector<float> carried_;
};

template <template <class> class Way>
void run(int64_t kind, const Shape& shape, const uint16_t* const* inputs, uint16_t* const* outputs, Memory memory,
         int threads) {
  if (kind == 0) Way<Lstm>(shape, inputs, outputs, memory, threads).run();
  if (kind == 1) Way<Gru>(shape, inputs, outputs, memory, threads).run();
  if (kind == 2) Way<Plain<Tanh>>(shape, inputs, outputs, memory, threads).run();
  if (kind == 3) Way<Plain<Relu>>(shape, inputs, outputs, memory, threads).run();
}

}  // namespace

extern "C" {

// inputs: data, w_ih, w_hh, b_ih, b_hh, h, c; outputs: output, last h, last c. All bf16 and contiguous; c, here and
// below, of an LSTM only.
void amp_recurrent_forward(int64_t kind, const Shape* shape, const uint16_t* const* inputs, uint16_t* const* outputs,
                           void* gates, float* states, int threads) {
  run<Forward>(kind, *shape, inputs, outputs, {static_cast<Bf16*>(gates), states}, threads);
}

// inputs: w_hh, the first state that is carried, gradients of the three outputs; outputs: gradients of h, of c, and of
// the sums for the data and for the state.
void amp_recurrent_backward(int64_t kind, const Shape* shape, const uint16_t* const* inputs, uint16_t* const* outputs,
                            void* gates, float* states, int threads) {
  run<Backward>(kind, *shape, inputs, outputs, {static_cast<Bf16*>(gates), states}, threads);
}

}  // extern "C"
