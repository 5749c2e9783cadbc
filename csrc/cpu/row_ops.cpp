#include <algorithm>
#include <cmath>

#include "cpu/functions.h"
#include "cpu/gemm/tile.h"
#include "cpu/simd.h"
#include "cpu/thread_pool.h"

namespace embert::cpu::EMBERT_ISA {
namespace {

template <typename Function>
inline float sum_of(int columns, const Function& function) {
  Floats sums = zero();
  for (int column = 0; column < columns; column += kLanes) {
    sums = where_first(columns - column, sums + function(column), sums);
  }
  return sum(sums);
}

void normalize_row(const float* x, int columns, const float* gamma, const float* beta, float epsilon, float* y) {
  const auto row = [&](int column) { return load(x + column, columns - column); };
  const Floats means = broadcast(beta ? sum_of(columns, row) / columns : 0.0f);
  const float squares = sum_of(columns, [&](int column) {
    const Floats centered = row(column) - means;
    return centered * centered;
  });
  const Floats scale = broadcast(1.0f / std::sqrt(squares / columns + epsilon));
  for (int column = 0; column < columns; column += kLanes) {
    const int left = columns - column;
    Floats value = (row(column) - means) * scale * load(gamma + column, left);
    if (beta) value += load(beta + column, left);
    store(y + column, value, left);
  }
}

bool in(std::int64_t row, const Table& table) {
  return row >= 0 && row < table.rows;
}

}  // namespace

void normalize(const float* x, int rows, int columns, const float* gamma, const float* beta, float epsilon, float* y,
               int threads) {
  for_rows(rows, columns, threads, [&](int row) {
    const std::ptrdiff_t column = std::ptrdiff_t(row) * columns;
    normalize_row(x + column, columns, gamma, beta, epsilon, y + column);
  });
}

bool embed(const std::int64_t* ids, const std::int64_t* position_ids, int tokens, const Table& words,
           const Table& positions, int columns, const float* gamma, const float* beta, float epsilon, float* y,
           int threads) {
  for (int token = 0; token < tokens; ++token) {
    if (!in(ids[token], words) || !in(position_ids[token], positions)) return false;
  }
  for_rows(tokens, columns, threads, [&](int token) {
    const float* const word = words.first + ids[token] * columns;
    const float* const position = positions.first + position_ids[token] * columns;
    float* const row = y + std::ptrdiff_t(token) * columns;
    for (int column = 0; column < columns; column += kLanes) {
      const int left = columns - column;
      store(row + column, load(word + column, left) + load(position + column, left), left);
    }
    normalize_row(row, columns, gamma, beta, epsilon, row);
  });
  return true;
}

void mean(const float* x, int sequences, int length, int columns, float* y, int threads) {
  const std::int64_t elements = std::int64_t{sequences} * length * columns;
  if (elements <= kMaxSerialElements) threads = 1;
  ThreadPool::shared().run(threads, sequences, [&](int sequence) {
    const float* const rows = x + std::ptrdiff_t(sequence) * length * columns;
    for (int column = 0; column < columns; column += kLanes) {
      const int left = columns - column;
      Floats total = zero();
      for (int first = 0; first < length; first += kPartialDepth) {
        Floats partial = zero();
        for (int row = first; row < std::min(length, first + kPartialDepth); ++row) {
          partial += load(rows + std::ptrdiff_t(row) * columns + column, left);
        }
        total += partial;
      }
      const Floats means = total / broadcast(static_cast<float>(length));
      store(y + std::ptrdiff_t(sequence) * columns + column, means, left);
    }
  });
}

}  // namespace embert::cpu::EMBERT_ISA
