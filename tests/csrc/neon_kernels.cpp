// Runs the CPU kernels for NEON on arrays from standard input; test_neon.py runs it on an emulated CPU.
//
// usage: neon_kernels neon|neon_dot model|attend|int8 THREADS NUMBER…, numbers as each function below reads them.
// Float32 arrays come in and go out in the order in which the functions use them.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/layer.h"

using namespace embert::cpu;

namespace {

const Kernels* kernels;
int threads;

template <typename T = float>
std::vector<T> read(std::size_t count) {
  std::vector<T> values(count);
  if (std::fread(values.data(), sizeof(T), count, stdin) != count) std::exit(3);
  return values;
}

void write(const std::vector<float>& values) {
  std::fwrite(values.data(), sizeof(float), values.size(), stdout);
}

std::unique_ptr<LinearLayer> read_linear(int out, int in) {
  const auto weight = read(std::size_t(out) * in), bias = read(out);
  return kernels->linear(weight.data(), bias.data(), out, in);
}

// A BERT-like encoder: embeddings, layers, and the mean of each sequence. Sequences have equal lengths.
void model(int sequences, int length, int layers, int hidden, int inner, int heads, int rows_of_tables) {
  const int tokens = sequences * length;
  const auto ids = read<std::int64_t>(tokens), positions = read<std::int64_t>(tokens);
  const auto words = read(rows_of_tables * hidden), places = read(rows_of_tables * hidden);
  const auto gamma = read(hidden), beta = read(hidden);
  std::vector<float> x(tokens * hidden), y(x.size()), means(sequences * hidden);
  const Table word_table{words.data(), rows_of_tables}, place_table{places.data(), rows_of_tables};
  if (!kernels->embed(ids.data(), positions.data(), tokens, word_table, place_table, hidden, gamma.data(), beta.data(),
                      1e-12f, x.data(), threads)) {
    std::exit(4);
  }
  for (int i = 0; i < layers; ++i) {
    const auto qkv = read_linear(3 * hidden, hidden), projection = read_linear(hidden, hidden);
    const auto first = read_linear(inner, hidden), last = read_linear(hidden, inner);
    const auto g1 = read(hidden), b1 = read(hidden), g2 = read(hidden), b2 = read(hidden);
    const Layer layer(*kernels, *qkv, *projection, *first, *last, Activation::kGelu, {g1.data(), b1.data(), 1e-12f},
                      {g2.data(), b2.data(), 1e-12f}, heads);
    layer(x.data(), tokens, {{0, sequences, length, length}}, {}, y.data(), threads);
    std::swap(x, y);
  }
  kernels->mean(x.data(), sequences, length, hidden, means.data(), threads);
  write(x);
  write(means);
}

// Attention of one sequence with RoPE over all columns of a head and a window, and its rows' RMSNorm.
void attend(int length, int heads, int size, int window) {
  const int hidden = heads * size;
  const auto qkv = read(3 * length * hidden), cosines = read(length * size / 2), sines = read(length * size / 2);
  const auto gamma = read(hidden);
  Positions positions;
  positions.cosines = cosines.data();
  positions.sines = sines.data();
  positions.rotary_dim = size / 2;
  positions.window = window;
  std::vector<float> context(length * hidden), normalized(context.size());
  kernels->attend(qkv.data(), {0, 1, length, length}, positions, heads, size, context.data(), threads, {});
  kernels->normalize(context.data(), length, hidden, gamma.data(), nullptr, 1e-6f, normalized.data(), threads);
  write(context);
  write(normalized);
}

void int8(int rows, int out, int in) {
  const auto x = read(rows * in);
  const auto weight = read<std::int8_t>(out * in);
  const auto scales = read(out), bias = read(out);
  std::vector<float> y(rows * out);
  const auto layer = kernels->int8_linear(weight.data(), scales.data(), bias.data(), out, in);
  (*layer)(x.data(), rows, {}, y.data(), threads);
  write(y);
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 4) return 2;
  kernels = std::strcmp(arguments[1], "neon_dot") == 0 ? &neon_dot::kKernels : &neon::kKernels;
  threads = std::atoi(arguments[3]);
  int n[8] = {};
  for (int i = 4; i < count && i < 12; ++i) n[i - 4] = std::atoi(arguments[i]);
  if (std::strcmp(arguments[2], "model") == 0) model(n[0], n[1], n[2], n[3], n[4], n[5], n[6]);
  if (std::strcmp(arguments[2], "attend") == 0) attend(n[0], n[1], n[2], n[3]);
  if (std::strcmp(arguments[2], "int8") == 0) int8(n[0], n[1], n[2]);
  return 0;
}
