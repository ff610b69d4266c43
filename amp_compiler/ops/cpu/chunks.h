// How the work on the tensors of a group is dealt out to threads: in runs of elements whose gradients lie in memory, in
// panels of those that are products, and both in chunks that stay in the nearest cache. What is done with a chunk, and
// what is found in it, is the business of update.cpp: `body(chunk, finding)`.

#pragma once

#include <utility>
#include <vector>

#include "blocks.h"
#include "product.h"
#include "types.h"

namespace amp {

constexpr int64_t kRun = 16384;               // elements that one thread takes at a time
constexpr int64_t kChunk = 512;               // elements of a run that go through all loops together
constexpr int64_t kPackedTogether = 1 << 19;  // elements of packed factors that are kept in the caches

// One row per tensor; addresses are 0 where a column is not used. Where `product` is one, there is no `grad`.
struct Row {
  int64_t count, grad_type, low_type;
  int64_t grad, weight, first, second, largest, low, step, product;
};

// What a check of some elements finds.
struct Finding {
  double sum = 0.0;  // of the squares of the elements times a factor
  int bad = 0;       // whether one is not finite
  int stale = 0;     // whether a 16-bit copy was not its weight rounded
};

// Neighbouring elements of a tensor, few enough to stay in the nearest cache, and their gradients.
struct Chunk {
  int64_t row, start, count;
  int64_t grads;  // address of the first
  int64_t type;   // of the gradients
};

// Calls `body` with a value of the gradient's type and one of the 16-bit copy's type.
template <class Body>
void with_types(int64_t grad_type, int64_t low_type, const Body& body) {
  const auto low = [&](auto grad) {
    if (low_type == kBf16) return body(grad, Bf16{});
    if (low_type == kHalf) return body(grad, Half{});
    return body(grad, None{});
  };
  if (grad_type == kBf16) return low(Bf16{});
  if (grad_type == kHalf) return low(Half{});
  return low(0.0f);
}

// The chunks of [start, end) of a tensor whose gradient lies in memory.
template <class Body>
void for_run(const Row& tensor, int64_t row, int64_t start, int64_t end, Finding* finding, const Body& body) {
  const int64_t size = tensor.grad_type == kFloat ? 4 : 2;
  for (; start < end; start += kChunk)
    body(Chunk{row, start, std::min(kChunk, end - start), tensor.grad + start * size, tensor.grad_type}, finding);
}

// A part of a product that one thread makes.
struct Panel {
  int64_t row;  // of the table
  const Packed* packed;
  int64_t first, rows, column, columns;
};

template <class Body>
void for_panel(const Panel& panel, Finding* finding, const Body& body) {
  thread_local std::vector<Bf16> buffer(static_cast<size_t>(kPanel));
  alignas(64) float line[kChunk];
  const Packed& packed = *panel.packed;
  if (!packed.few()) packed.panel(panel.first, panel.rows, panel.column, panel.columns, buffer.data());
  for (int64_t i = 0; i < panel.rows; ++i) {
    const int64_t row = panel.first + i;
    const Additions additions(packed.product(), row);
    for (int64_t j = 0; j < panel.columns; j += kChunk) {
      const int64_t column = panel.column + j, count = std::min(kChunk, panel.columns - j);
      const Bf16* there = buffer.data() + i * panel.columns + j;
      Chunk chunk{panel.row, row * packed.product().columns + column, count, reinterpret_cast<int64_t>(line), kFloat};
      if (packed.few()) {
        packed.line(row, column, count, line);
      } else if (!additions.empty()) {
        widen(there, line, count, 1.0f);
      } else {
        chunk.grads = reinterpret_cast<int64_t>(there);
        chunk.type = kBf16;
      }
      additions.add(column, count, line);
      body(chunk, finding);
    }
  }
}

inline std::vector<Panel> panels_of(int64_t row, const Packed& packed) {
  const Product& product = packed.product();
  const int64_t columns = std::min(product.columns, kPanelColumns);
  const int64_t rows = columns * kPanelRows <= kPanel ? kPanelRows : kBlock;
  std::vector<Panel> panels;
  for (int64_t first = 0; first < product.rows; first += rows)
    for (int64_t column = 0; column < product.columns; column += columns)
      panels.push_back({row, &packed, first, std::min(rows, product.rows - first), column,
                        std::min(columns, product.columns - column)});
  return panels;
}

using Findings = std::vector<Finding>;

inline void add(const Finding& part, Finding* sum) {
  sum->sum += part.sum;
  sum->bad |= part.bad;
  sum->stale |= part.stale;
}

// Products whose packed factors fit into the caches together: threads meet twice for all of them.
template <class Body>
void for_products(const std::vector<std::pair<int64_t, const Product*>>& products, int threads, Findings* result,
                  const Body& body) {
  std::vector<Packed> packed;
  packed.reserve(products.size());
  std::vector<std::pair<Packed*, int64_t>> columns;
  std::vector<Panel> panels;
  for (const auto& [row, product] : products) {
    Packed& one = packed.emplace_back(*product);
    for (int64_t tile = 0; tile < one.column_tiles(); ++tile) columns.emplace_back(&one, tile);
    for (const Panel& panel : panels_of(row, one)) panels.push_back(panel);
  }
  Findings findings(panels.size());
#pragma omp parallel num_threads(threads)
  {
    const TileShape shape;
#pragma omp for schedule(static)
    for (size_t i = 0; i < columns.size(); ++i) columns[i].first->pack_columns(columns[i].second);
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < panels.size(); ++i) for_panel(panels[i], &findings[i], body);
  }
  for (size_t i = 0; i < panels.size(); ++i) add(findings[i], &(*result)[panels[i].row]);
}

// Neighbouring elements of a tensor that one thread takes.
struct Run {
  int64_t row, start, end;
};

// All chunks of all tensors, on many threads. Returns one finding per tensor, added up in one order whatever the number
// of threads.
template <class Body>
Findings for_all(const Row* rows, int64_t tensors, int threads, const Body& body) {
  std::vector<Run> runs;
  std::vector<std::pair<int64_t, const Product*>> products;
  Findings result(static_cast<size_t>(tensors));
  int64_t packed = 0;  // elements
  for (int64_t row = 0; row < tensors; ++row) {
    if (rows[row].product == 0) {
      for (int64_t start = 0; start < rows[row].count; start += kRun)
        runs.push_back({row, start, std::min(start + kRun, rows[row].count)});
      continue;
    }
    products.emplace_back(row, reinterpret_cast<const Product*>(rows[row].product));
    packed += products.back().second->columns * products.back().second->inner;
    if (packed > kPackedTogether) {
      for_products(products, threads, &result, body);
      products.clear();
      packed = 0;
    }
  }
  if (!products.empty()) for_products(products, threads, &result, body);
  Findings parts(runs.size());
#pragma omp parallel for num_threads(threads) schedule(static) if (runs.size() > 1)
  for (size_t i = 0; i < runs.size(); ++i)
    for_run(rows[runs[i].row], runs[i].row, runs[i].start, runs[i].end, &parts[i], body);
  for (size_t i = 0; i < runs.size(); ++i) add(parts[i], &result[runs[i].row]);
  return result;
}

inline double total(const Findings& findings) {
  double sum = 0.0;
  for (const Finding& finding : findings) sum += finding.sum;
  return sum;
}

}  // namespace amp
