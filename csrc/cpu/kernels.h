// The kernels of one instruction set. CPUs that lack it must not call them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace embert::cpu {

enum class Activation { kNone, kGelu, kGeluTanh, kRelu, kSilu };

// The epilogue of a product, element by element: activation(product + residual) · gate. The latter two are [rows, out].
struct Epilogue {
  Activation activation = Activation::kNone;
  const float* residual = nullptr;
  const float* gate = nullptr;
};

// A linear layer of any kind of product.
class LinearLayer {
 public:
  LinearLayer(int out, int in) : out_(out), in_(in) {}
  virtual ~LinearLayer();
  LinearLayer(const LinearLayer&) = delete;
  LinearLayer& operator=(const LinearLayer&) = delete;

  // x [rows, in] → y [rows, out] = epilogue of x · weightᵀ + bias. A row of y is batch-invariant.
  virtual void operator()(const float* x, int rows, const Epilogue& epilogue, float* y, int threads) const = 0;

  int out() const { return out_; }
  int in() const { return in_; }

 protected:
  int out_, in_;
};

// Consecutive sequences of equal length, which continue the same prefix.
struct SequenceGroup {
  int start;  // the first token
  int sequences;
  int length;  // tokens of each
  int keys;    // only the first tokens are attended to, this many, those of the prefix included
  // The first rows of another sequence come before each one's own: queries attend to their keys, too, and positions go
  // on. A row has the same bits as that of a sequence which has all rows itself.
  int prefix = 0;        // tokens
  int prefix_start = 0;  // the first one
};

// How a layer encodes positions, and which keys a query attends to.
struct Positions {
  const float* cosines = nullptr;  // [length, rotary_dim]: RoPE pairs columns i and i + rotary_dim
  const float* sines = nullptr;    // likewise; null: no RoPE
  int rotary_dim = 0;
  const float* bias = nullptr;  // [heads, 2 · longest - 1]: of key j and query i at j - i + longest - 1; null: none
  int longest = 0;
  int window = -1;      // a query attends to keys that are at most this many tokens away; -1: all
  bool causal = false;  // a query attends to no later key
  int kv_heads = 0;     // heads of keys and values, each shared by as many of the queries; 0: as many as queries have
};

// Disentangled attention (DeBERTa): scores also have q·K[r] and Q[r]·k of the row r for the distance, added as they
// are.
struct DistanceRows {
  // K and Q of each head, transposed: [heads, size, columns]; null: the part is absent.
  const float* keys = nullptr;
  const float* queries = nullptr;
  int columns = 0;                       // rows of the table, rounded up to whole registers
  const std::int32_t* row_of = nullptr;  // [2 · longest - 1], by key - query + longest - 1; never grows
  int longest = 0;
};

// A table's rows [rows, columns].
struct Table {
  const float* first;
  std::int64_t rows;
};

struct Kernels {
  const char* name;
  int lanes;  // floats in a register

  // x · weightᵀ + bias in float32: `weight` is [out, in] and `bias` [out]; both are copied.
  std::unique_ptr<LinearLayer> (*linear)(const float* weight, const float* bias, int out, int in);

  // x · weightᵀ + bias; x is rotated and quantized row by row, sums are exact. `weight` is [out, in], rotated, with
  // `in` a multiple of 128; `scales` and `bias` are [out]. All are copied.
  std::unique_ptr<LinearLayer> (*int8_linear)(const std::int8_t* weight, const float* scales, const float* bias,
                                              int out, int in);

  // x [rows, columns] → y, which may be x. With beta (x - mean) / √(variance + epsilon) · gamma + beta; without, `beta`
  // null, x / √(mean square + epsilon) · gamma. `gamma` and `beta` are [columns].
  void (*normalize)(const float* x, int rows, int columns, const float* gamma, const float* beta, float epsilon,
                    float* y, int threads);

  // words[ids[i]] + positions[position_ids[i]], normalized as above → y [tokens, columns]. Returns whether all ids and
  // positions are rows of their tables; if not, y is incomplete.
  bool (*embed)(const std::int64_t* ids, const std::int64_t* position_ids, int tokens, const Table& words,
                const Table& positions, int columns, const float* gamma, const float* beta, float epsilon, float* y,
                int threads);

  // The mean of each sequence's rows: x [sequences, length, columns] → y [sequences, columns].
  void (*mean)(const float* x, int sequences, int length, int columns, float* y, int threads);

  // qkv [T, (heads + 2 · kv_heads) · size] → context [T, heads · size] for the tokens of a group. Queries are scaled
  // already; `size` is a multiple of `lanes`. A query that attends to no key gets zeros.
  void (*attend)(const float* qkv, const SequenceGroup& group, const Positions& positions, int heads, int size,
                 float* context, int threads, const DistanceRows& distances);
};

#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
#elif defined(__aarch64__)
namespace neon {
extern const Kernels kKernels;
}
namespace neon_dot {
extern const Kernels kKernels;
}
#endif

}  // namespace embert::cpu
