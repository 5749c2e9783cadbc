// A product of 8 bits as GPUs other than Hopper run it, on the host: csrc/gemm/cublaslt.cpp before a stand-in that
// multiplies integers (its path is the argument), csrc/gemm/int8/rescale.cu lane by lane. Reads a header of int32 and
// arrays from standard input, in the order of `main`; writes y, y's sums and the scales of rows that it was given.

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kernels_on_host/warp.h"
// After it.
#include "gemm/gemm.h"
#include "gemm/int8/rescale.cu"
#include "no_device.h"

extern "C" {
cudaError_t cudaMalloc(void** address, size_t bytes) {
  *address = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(*address, 0x7f, bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* address) {
  std::free(address);
  return cudaSuccess;
}
}

namespace embert {

// Rows are there already.
Status quantize_rows(DType, const RowView& x, const Norm& norm, int rows, int columns, float epsilon,
                     const QuantizedRows&, const Stream&) {
  std::fprintf(stderr, "quantize rows=%d columns=%d sums=%d normed=%d epsilon=%g\n", rows, columns, x.stats != nullptr,
               norm.gamma != nullptr, epsilon);
  return {};
}
Status quantize_block_rows(DType, const void*, int rows, int columns, int block, const QuantizedRows&, const Stream&) {
  std::fprintf(stderr, "quantize blocks rows=%d columns=%d block=%d\n", rows, columns, block);
  return {};
}

}  // namespace embert

using namespace embert;

namespace {

template <typename T>
std::vector<T> read(size_t count) {
  std::vector<T> values(count);
  if (std::fread(values.data(), sizeof(T), count, stdin) != count) std::exit(3);
  return values;
}
template <typename T>
void write(const std::vector<T>& values, size_t count) {
  std::fwrite(values.data(), sizeof(T), count, stdout);
}
void check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "refused %s\n", status.message().c_str());
  std::exit(0);
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) return 2;
  const auto header = read<int32_t>(8);
  const int rows = header[0], out = header[1], in = header[2], parts = header[4];
  const int adds = header[5];  // of a residual: its LayerNorm, its rows, their sums, sums of y; a bit for each
  const bool normed = header[6] != 0;
  const size_t groups = (out + 127) / 128, memory = size_t(rows + 31) / 32 * 32;
  auto x = read<int8_t>(size_t(rows) * in);
  x.resize(memory * in, 99);  // of rows that do not exist
  auto row_scales = read<float>(rows);
  auto weight = read<int8_t>(size_t(out) * in);
  const auto scales = read<float>(out), bias = read<float>(out), gamma = read<float>(out), beta = read<float>(out);
  const auto residual = read<uint16_t>(adds != 0 ? size_t(rows) * out : 0);
  const auto sums = read<float2>(adds != 0 ? rows * groups * parts : 0);

  std::unique_ptr<GemmProvider> provider;
  check(make_cublaslt(DType(header[7]), arguments[1], provider));
  LinearWeights of;
  of.weight = weight.data(), of.scales = scales.data(), of.bias = bias.data();
  of.n = out, of.k = in, of.activation = Activation(header[3]), of.epsilon = 1e-5f;
  if ((adds & 1) != 0) of.residual_norm = {gamma.data(), beta.data()};
  if (normed) of.input_norm = {gamma.data(), beta.data()};
  of.quantized = {x.data(), row_scales.data()};
  std::unique_ptr<Linear> linear;
  check(provider->prepare(of, {}, linear));

  std::vector<uint16_t> y(size_t(rows + 1) * out, 0xffff);  // a row that must stay as it is
  std::vector<float2> y_stats((rows + 1) * groups, float2{-1.0f, -1.0f});
  int y_splits = 0;
  const RowView from{weight.data(), reinterpret_cast<const float2*>(gamma.data()), 1};  // any rows: nobody reads them
  const RowView added{(adds & 2) != 0 ? residual.data() : nullptr, (adds & 4) != 0 ? sums.data() : nullptr, parts};
  check(linear->run(from, added, rows, y.data(), (adds & 8) != 0 ? y_stats.data() : nullptr, y_splits, {}));
  std::fprintf(stderr, "parts=%d workspace=%zu\n", y_splits, provider->workspace_bytes());
  write(y, y.size());
  write(y_stats, y_stats.size());
}
