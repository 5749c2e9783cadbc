// A device whose kernels compute on the CPU, slowly and plainly, what their headers promise. Storage types round as
// they do on a device. With it the encoder's host side is compared with another encoder as a whole, without a GPU.
// Programs that read no results leave `computes` false: kernels then return at once.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3")  // the host side's sources have -O1; these loops take most of the time of the tests
#endif

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "attention/attention.h"
#include "common/tensor_maps.h"
#include "gemm/gemm.h"
#include "heads/heads.h"
#include "heads/splade.h"
#include "ops/convolution.h"
#include "ops/elementwise.h"
#include "ops/embedding.h"
#include "ops/experts.h"
#include "ops/norm.h"
#include "ops/quantize.h"
#include "recording_device.h"

namespace embert {
namespace {

using Row = std::vector<double>;

double get(DType dtype, const void* from, size_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(from)[i];
  if (dtype == DType::kFloat16) return __half2float(static_cast<const __half*>(from)[i]);
  if (dtype == DType::kInt8) return static_cast<const int8_t*>(from)[i];
  return __bfloat162float(static_cast<const __nv_bfloat16*>(from)[i]);
}
void put(DType dtype, void* to, size_t i, double value) {
  if (dtype == DType::kFloat32)
    static_cast<float*>(to)[i] = float(value);
  else if (dtype == DType::kFloat16)
    static_cast<__half*>(to)[i] = __float2half_rn(float(value));
  else
    static_cast<__nv_bfloat16*>(to)[i] = __float2bfloat16_rn(float(value));
}
Row row_of(DType dtype, const void* from, size_t row, int columns) {
  Row values(columns);
  for (int i = 0; i < columns; ++i) values[i] = get(dtype, from, row * columns + i);
  return values;
}
void put_row(DType dtype, void* to, size_t row, const Row& values) {
  for (size_t i = 0; i < values.size(); ++i) put(dtype, to, row * values.size() + i, values[i]);
}

// y's rows: those of x, as `change` leaves them.
template <typename Change>
Status map_rows(DType dtype, const void* x, int rows, int columns, void* y, const Change& change) {
  for (int row = 0; computes && row < rows; ++row) {
    Row values = row_of(dtype, x, row, columns);
    change(values, row);
    put_row(dtype, y, row, values);
  }
  return {};
}

int groups_of(int columns) {
  return (columns + kStatColumns - 1) / kStatColumns;
}
void put_sums(float2* sums, size_t row, const Row& values) {
  double sum = 0, squares = 0;
  for (const double x : values) sum += x, squares += x * x;
  float2* const at = sums + row * groups_of(int(values.size()));
  for (int group = 0; group < groups_of(int(values.size())); ++group) at[group] = {0.0f, 0.0f};
  at[0] = {float(sum), float(squares)};
}
// LayerNorm or RMSNorm of a row, by its own sums or by those that were left with it; without a Norm the row itself.
void normalize(Row& row, const Norm& norm, double epsilon, const float2* sums, bool gamma_in_row, bool rms = false) {
  if (norm.gamma == nullptr) return;
  const int n = int(row.size());
  double sum = 0, squares = 0;
  if (sums == nullptr) {
    for (const double x : row) sum += x, squares += x * x;
  } else {
    for (int group = 0; group < groups_of(n); ++group) sum += sums[group].x, squares += sums[group].y;
  }
  const double mean = rms ? 0 : sum / n, scale = 1 / std::sqrt(std::max(0.0, squares / n - mean * mean) + epsilon);
  for (int i = 0; i < n; ++i) {
    const double gamma = norm.gamma[i], centered = gamma_in_row ? row[i] - mean * gamma : (row[i] - mean) * gamma;
    row[i] = centered * scale + (norm.beta == nullptr ? 0 : norm.beta[i]);
  }
}

double activated(Activation activation, double x) {
  switch (activation) {
    case Activation::kGeluErf:
      return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
    case Activation::kGeluTanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::kRelu:
      return std::max(x, 0.0);
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
    default:
      return x;
  }
}

void turn_row(Row& row, const RopeColumns& of, int position) {
  for (int column = 0; column + 1 < of.columns; column += 2) {
    if (column % of.head_size >= of.rotary_dim) continue;
    const float2 by = of.table[size_t(position) * (of.rotary_dim / 2) + column % of.head_size / 2];
    const double a = row[column], b = row[column + 1];
    row[column] = a * by.x - b * by.y;
    row[column + 1] = b * by.x + a * by.y;
  }
}

// A row in 8 bits, as ops/quantize.h has it, and its scale.
double quantize(Row& row) {
  double largest = 0;
  const size_t quarter = row.size() / 4;
  for (size_t first = 0; first < quarter; first += 8) {
    const auto at = [&](int n) -> double& { return row[n / 8 * quarter + first + n % 8]; };
    for (int stride = 1; stride < kRotated; stride *= 2) {
      for (int i = 0; i < kRotated; ++i) {
        if ((i & stride) != 0) continue;
        double &a = at(i), &b = at(i + stride);
        const double sum = a + b, difference = a - b;
        a = sum, b = difference;
      }
    }
  }
  for (const double x : row) largest = std::max(largest, std::abs(x));
  for (double& x : row) x = largest == 0 ? 0.0 : std::nearbyint(x * (127 / largest));
  return largest / 127 / std::sqrt(double(kRotated));
}

// Rows in blocks of 8 bits, as ops/blocks.cuh has them, in the order of the weights' columns.
double quantize_blocks(Row& row, int block) {
  std::vector<double> maxima;
  for (size_t first = 0; first < row.size(); first += block) {
    for (int stride = 8; stride < block; stride *= 2) {
      for (int i = 0; i < block; ++i) {
        if ((i & stride) != 0) continue;
        double &a = row[first + i], &b = row[first + i + stride];
        const double sum = a + b, difference = a - b;
        a = sum, b = difference;
      }
    }
    double most = 1.0 / 512;
    for (int i = 0; i < block; ++i) most = std::max(most, std::abs(row[first + i]));
    for (int i = 0; i < block; ++i) row[first + i] = std::nearbyint(row[first + i] * (127 / most));
    maxima.push_back(most);
  }
  const double largest = *std::max_element(maxima.begin(), maxima.end());
  const Row before = row;
  for (size_t i = 0; i < row.size(); ++i) {
    const size_t lane = i % 16 / 4, byte = i % 4, column = i / 16 * 16 + 2 * lane + byte % 2 + byte / 2 * 8;
    row[i] = std::nearbyint(before[column] * std::nearbyint(128 * maxima[column / block] / largest) / 128);
  }
  return largest / 127 / (block == kInnerBlock ? 1.0 : std::sqrt(block / 8.0));
}

class ComputingLinear final : public Linear {
 public:
  ComputingLinear(const LinearWeights& weights, DType dtype) : weights_(weights), dtype_(dtype) {
    if (weights.rope != nullptr) rope_ = *weights.rope;
    weights_.rope = nullptr;
    const DType stored = weights.scales != nullptr ? DType::kInt8 : dtype;
    if (computes) matrix_ = row_of(stored, weights.weight, 0, (weights.gated ? 2 : 1) * weights.n * weights.k);
  }

  Status run(const RowView& x, const RowView& residual, int rows, void* y, float2* y_stats, int& y_splits,
             const Stream&) override {
    EMBERT_TRY(check_operands(x, residual, y, y_stats));
    if (!computes) return {};
    const LinearWeights& w = weights_;
    const bool norms_x = w.input_norm.gamma != nullptr, norms_residual = w.residual_norm.gamma != nullptr && !w.rms;
    if (norms_x != (x.stats != nullptr) || norms_residual != (residual.stats != nullptr))
      return Status::refused("a product is given sums where it has a LayerNorm, and nowhere else");
    const int sums = groups_of(w.k), residual_sums = groups_of(w.n);
    for (int row = 0; row < rows; ++row) {
      Row in = row_of(dtype_, x.data, row, w.k);
      normalize(in, w.input_norm, w.epsilon, norms_x ? x.stats + size_t(row) * sums : nullptr, w.prescaled_rows, w.rms);
      if (w.scales != nullptr) scale_ = w.block > 0 ? quantize_blocks(in, w.block) : quantize(in);
      Row out(w.n);
      for (int n = 0; n < w.n; ++n)
        out[n] = w.gated ? activated(w.activation, product(in, 2 * n)) * product(in, 2 * n + 1)
                         : activated(w.activation, product(in, n));
      for (double& each : out)
        if (w.scales != nullptr && w.activation != Activation::kNone) each /= 4;  // ops/activation.cuh
      if (rope_.table != nullptr) turn_row(out, rope_, rope_.positions[row]);
      if (residual.data != nullptr) {
        Row rest = row_of(dtype_, residual.data, row, w.n);
        if (norms_residual)
          normalize(rest, w.residual_norm, w.epsilon, residual.stats + size_t(row) * residual_sums, w.prescaled_rows);
        const float* const divisors = norms_residual ? nullptr : w.residual_norm.gamma;
        for (int n = 0; n < w.n; ++n) out[n] += divisors == nullptr ? rest[n] : rest[n] / divisors[n];
      }
      if (y_stats != nullptr) put_sums(y_stats, row, out);
      for (int n = 0; n < w.n && w.next_gamma != nullptr; ++n) out[n] *= w.next_gamma[n];
      put_row(dtype_, y, row, out);
    }
    y_splits = 1;
    return {};
  }

 private:
  double product(const Row& in, int n) const {
    double sum = 0;
    const double* const row = matrix_.data() + size_t(n) * weights_.k;
    for (int k = 0; k < weights_.k; ++k) sum += in[k] * row[k];
    return (weights_.scales == nullptr ? sum : sum * scale_ * weights_.scales[n]) + weights_.bias[n];
  }

  LinearWeights weights_;
  RopeColumns rope_;
  DType dtype_;
  Row matrix_;
  double scale_ = 1;  // of the row at work, in 8 bits
};

class ComputingGemm final : public GemmProvider {
 public:
  ComputingGemm(bool hopper, DType dtype) : hopper_(hopper), dtype_(dtype) {}
  const char* name() const override { return hopper_ ? "hopper" : "cublaslt"; }
  Status prepare(const LinearWeights& weights, const Stream&, std::unique_ptr<Linear>& linear) override {
    tell("prepare scales=%ld quantized=%ld quantized_scales=%ld\n", at(weights.scales), at(weights.quantized.data),
         at(weights.quantized.scales));
    linear = std::make_unique<ComputingLinear>(weights, dtype_);
    return {};
  }
  size_t workspace_bytes() const override { return 0; }
  bool dependent_launch() const override { return hopper_; }
  bool folds() const override { return hopper_; }
  bool fuses_rope() const override { return hopper_; }
  bool fuses_gate() const override { return hopper_; }
  bool has_int8() const override { return dtype_ == DType::kFloat16; }

 private:
  bool hopper_;
  DType dtype_;
};

}  // namespace

Status make_sm90(DType dtype, std::unique_ptr<GemmProvider>& provider) {
  provider = std::make_unique<ComputingGemm>(true, dtype);
  return {};
}
Status make_cublaslt(DType dtype, const std::string&, std::unique_ptr<GemmProvider>& provider) {
  provider = std::make_unique<ComputingGemm>(false, dtype);
  return {};
}

Status compute_offsets(const OffsetsInput& in, const OffsetsOutput& out, const OffsetsCapacity& capacity,
                       const Stream&) {
  tell("offsets\n");
  if (!computes) return {};
  int row = 0, tiles = 0, shorts = 0;
  for (int i = 0; i < in.header[0]; ++i) {
    const int first = row, length = in.lengths[i];
    out.cu_seqlens[i] = first;
    out.cuts[i] = in.cuts[i];
    for (; row < first + length; ++row) {
      out.ids[row] = in.ids[row], out.types[row] = in.types[row];
      out.positions[row] = row - first;
    }
    if (length <= kAttentionShort) out.shorts[shorts++] = {first, length, 0, 0};
    for (int query = 0; length > kAttentionShort && query < length; query += kAttentionRows)
      out.tiles[tiles++] = {first, length, query, 0};
  }
  for (int i = in.header[0]; i <= capacity.sequences; ++i) out.cu_seqlens[i] = row;
  return {};
}
Status embed(DType dtype, const EmbeddingTables& tables, const int* ids, const int* types, const int* positions,
             int rows, int hidden, float epsilon, void* y, float2* sums, const Stream&) {
  tell("embedding\n");
  if (!computes) return {};
  for (int row = 0; row < rows; ++row) {
    Row x = row_of(dtype, tables.word, ids[row], hidden);
    const Row place = row_of(dtype, tables.position, positions[row], hidden);
    const Row kind = tables.type == nullptr ? Row(hidden) : row_of(dtype, tables.type, types[row], hidden);
    for (int i = 0; i < hidden; ++i) x[i] += place[i] + kind[i];
    if (sums != nullptr) {
      put_sums(sums, row, x);
      for (int i = 0; i < hidden && tables.prescaled_rows; ++i) x[i] *= tables.norm.gamma[i];
    } else {
      normalize(x, tables.norm, epsilon, nullptr, false);
    }
    put_row(dtype, y, row, x);
  }
  return {};
}
Status add_types(DType dtype, const Norm& norm, float epsilon, const void* type, const int* types, int rows, int hidden,
                 void* x, float2* sums, const Stream&) {
  return map_rows(dtype, x, rows, hidden, x, [&](Row& values, int row) {
    normalize(values, norm, epsilon, nullptr, false);
    const Row added = row_of(dtype, type, types[row], hidden);
    for (int i = 0; i < hidden; ++i) values[i] += added[i];
    if (sums != nullptr) put_sums(sums, row, values);
  });
}
Status layernorm(DType dtype, const void* x, const Norm& norm, int rows, int hidden, float epsilon, void* y,
                 const Stream&) {
  return map_rows(dtype, x, rows, hidden, y,
                  [&](Row& values, int) { normalize(values, norm, epsilon, nullptr, false); });
}
Status rmsnorm(DType dtype, const void* x, const float* gamma, int rows, int hidden, float epsilon, void* y,
               const Stream&) {
  return map_rows(dtype, x, rows, hidden, y,
                  [&](Row& values, int) { normalize(values, {gamma, nullptr}, epsilon, nullptr, false, true); });
}
Status split_gamma(DType dtype, void* weight, float* gamma, int rows, int columns, const Stream&) {
  if (!computes) return {};
  for (int k = 0; k < columns; ++k) {
    int exponent = 0;
    const float factor = gamma[k] == 0 ? 1.0f : 2 * std::frexp(gamma[k], &exponent);
    for (int row = 0; row < rows; ++row) {
      const size_t i = size_t(row) * columns + k;
      put(dtype, weight, i, get(dtype, weight, i) * (gamma[k] / factor));
    }
    gamma[k] = factor;
  }
  return {};
}
Status add_rmsnorm(DType dtype, const void* x, const float* gamma, int rows, int hidden, float epsilon, void* y,
                   const float* before, const float* after, float2* y_stats, const Stream&) {
  return map_rows(dtype, x, rows, hidden, y, [&](Row& values, int row) {
    const Row residual = row_of(dtype, y, row, hidden);
    normalize(values, {gamma, nullptr}, epsilon, nullptr, false, true);
    for (int i = 0; i < hidden; ++i) values[i] += before == nullptr ? residual[i] : residual[i] / before[i];
    if (y_stats != nullptr) put_sums(y_stats, row, values);
    for (int i = 0; i < hidden && after != nullptr; ++i) values[i] *= after[i];
  });
}
Status embed_words(DType dtype, const void* word, const int* ids, int rows, int hidden, float scale, void* y,
                   const float* after, float2* y_stats, const Stream&) {
  if (!computes) return {};
  float rounded = scale;
  put(dtype, &rounded, 0, scale);
  const double factor = get(dtype, &rounded, 0);
  for (int row = 0; row < rows; ++row) {
    Row values = row_of(dtype, word, ids[row], hidden);
    for (double& each : values) each *= factor;
    if (y_stats != nullptr) put_sums(y_stats, row, values);
    for (int i = 0; i < hidden && after != nullptr; ++i) values[i] *= after[i];
    put_row(dtype, y, row, values);
  }
  return {};
}
Status multiply_rmsnorm(DType dtype, const void* x, const float* gamma, int rows, int hidden, float epsilon, void* y,
                        const Stream&) {
  return map_rows(dtype, x, rows, hidden, y, [&](Row& values, int row) {
    const Row factors = row_of(dtype, y, row, hidden);
    normalize(values, {gamma, nullptr}, epsilon, nullptr, false, true);
    for (int i = 0; i < hidden; ++i) values[i] *= factors[i];
  });
}
Status qk_norm_rope(DType dtype, void* x, int rows, int pitch, const HeadNorms& norms, const RopeColumns& rope,
                    int value_heads, const Stream&) {
  return map_rows(dtype, x, rows, pitch, x, [&](Row& values, int row) {
    const std::vector<float> ones(rope.head_size, 1.0f);
    for (int column = 0; column < rope.columns + value_heads * rope.head_size; column += rope.head_size) {
      Row head(values.begin() + column, values.begin() + column + rope.head_size);
      const float* const gamma = column >= rope.columns                  ? ones.data()
                                 : column / rope.head_size < norms.heads ? norms.query
                                                                         : norms.key;
      normalize(head, {gamma, nullptr}, norms.epsilon, nullptr, false, true);
      std::copy(head.begin(), head.end(), values.begin() + column);
    }
    turn_row(values, rope, rope.positions[row]);
  });
}
bool attention_writes_blocks(DType, const WindowedWork&, int, const TensorMaps*) {
  return false;
}
Status attention_in_blocks(const void*, int, const WindowedWork&, int, const RelativeScores&, const QuantizedBlocks&,
                           TensorMaps&, const Stream&) {
  return Status::refused("attention: no blocks");
}
Status attention(DType dtype, const void* qkv, int, const WindowedWork& work, const AttentionHeads& shape,
                 const RelativeScores& relative, void* context, TensorMaps*, const Stream&) {
  if (fails(faults.attentions)) return faults.attention;
  if (!computes) return {};
  const int heads = shape.heads, dim = shape.head_size, group = heads / shape.kv_heads;
  const size_t hidden = size_t(heads) * dim, pitch = hidden + 2 * size_t(shape.kv_heads) * dim;
  const double scale = shape.scale == 0.0f ? 1 / std::sqrt(double(dim)) : shape.scale;
  const auto attend = [&](const AttentionTile& tile, const TilePrefix& prefix, int head, int query) {
    const auto row_of = [&](int key) { return size_t((key < prefix.tokens ? prefix.row : tile.first_row) + key); };
    const size_t row = row_of(query);
    // `column`: of a head, counted over queries, keys and values.
    const auto element = [&](int column, size_t token, int c) {
      return get(dtype, qkv, token * pitch + column * dim + c);
    };
    const int key_head = heads + head / group, value_head = key_head + shape.kv_heads;
    std::vector<double> scores(tile.length, -INFINITY);
    double highest = -INFINITY, total = 0;
    for (int key = 0; key < tile.length; ++key) {
      if ((work.window > 0 && std::abs(key - query) > work.window) || (shape.causal && key > query)) continue;
      double score =
          relative.scores == nullptr ? 0.0 : relative.scores[size_t(2 * head + 1) * relative.reach + key - query];
      for (int c = 0; c < dim; ++c) score += element(head, row, c) * element(key_head, row_of(key), c);
      scores[key] = score * scale;
      highest = std::max(highest, scores[key]);
    }
    Row out(dim);
    for (int key = 0; key < tile.length; ++key) {
      const double weight = std::exp(scores[key] - highest);
      total += weight;
      for (int c = 0; c < dim; ++c) out[c] += weight * element(value_head, row_of(key), c);
    }
    if (highest == -INFINITY) out.assign(dim, 0.0), total = 1;  // it sees no key
    for (int c = 0; c < dim; ++c) put(dtype, context, row * hidden + head * dim + c, out[c] / total);
  };
  const auto walk = [&](const AttentionTile* tiles, int count, const TilePrefix* prefixes) {
    for (int i = 0; i < count; ++i)
      for (int head = 0; head < heads; ++head)
        for (int q = tiles[i].query; q < std::min(tiles[i].tokens(), tiles[i].query + kAttentionRows); ++q)
          attend(tiles[i], prefixes == nullptr ? TilePrefix{} : prefixes[i], head, q);
  };
  walk(work.tiles, work.tile_count, work.prefixes);
  walk(work.shorts, work.short_count, nullptr);
  return {};
}
Status attention_sm80_disentangled(DType dtype, const void* qkv, const AttentionWork& work, const AttentionHeads& shape,
                                   const DisentangledScores& positions, void* context, const Stream&) {
  if (!computes) return {};
  const int dim = shape.head_size;
  const size_t hidden = size_t(shape.heads) * dim;
  const auto attend = [&](const AttentionTile& tile, int head, int query) {
    // Columns of a head of a row of queries (0), keys (1) or values (2), or of a table.
    const auto columns = [&](const void* from, size_t pitch, size_t row, size_t part) {
      Row values(dim);
      for (int c = 0; c < dim; ++c) values[c] = get(dtype, from, row * pitch + part * hidden + head * dim + c);
      return values;
    };
    const auto product = [](const Row& a, const Row& b) {
      return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
    };
    const Row q = columns(qkv, 3 * hidden, size_t(tile.first_row) + query, 0);
    Row scores(tile.length), mixed(dim);
    for (int key = 0; key < tile.length; ++key) {
      const Row k = columns(qkv, 3 * hidden, size_t(tile.first_row) + key, 1);
      const size_t row = positions.row_of[query - key + positions.longest - 1];
      scores[key] = product(q, k);
      if (positions.keys != nullptr) scores[key] += product(q, columns(positions.keys, hidden, row, 0));
      if (positions.queries != nullptr) scores[key] += product(k, columns(positions.queries, hidden, row, 0));
    }
    const double highest = *std::max_element(scores.begin(), scores.end());
    double total = 0;
    for (int key = 0; key < tile.length; ++key) {
      const double weight = std::exp(scale_of(shape) * (scores[key] - highest));
      const Row v = columns(qkv, 3 * hidden, size_t(tile.first_row) + key, 2);
      for (int c = 0; c < dim; ++c) mixed[c] += weight * v[c];
      total += weight;
    }
    for (int c = 0; c < dim; ++c)
      put(dtype, context, (size_t(tile.first_row) + query) * hidden + head * dim + c, mixed[c] / total);
  };
  for (int i = 0; i < work.tile_count + work.short_count; ++i) {
    const AttentionTile& tile = i < work.tile_count ? work.tiles[i] : work.shorts[i - work.tile_count];
    for (int head = 0; head < shape.heads; ++head)
      for (int q = tile.query; q < std::min(tile.tokens(), tile.query + kAttentionRows); ++q) attend(tile, head, q);
  }
  return {};
}
Status clear_hidden_rows(DType dtype, const AttentionTile* tiles, int count, const float* bias, int hidden, void* x,
                         const Stream&) {
  for (const AttentionTile* tile = tiles; computes && tile < tiles + count; ++tile) {
    for (int row = tile->length; row < tile->tokens(); ++row)
      for (int c = 0; c < 3 * hidden; ++c) put(dtype, x, size_t(tile->first_row + row) * 3 * hidden + c, bias[c]);
  }
  return {};
}
Status convolve_rows(DType dtype, const void* x, const int* positions, const Convolution& by, int rows, int hidden,
                     void* y, const Stream&) {
  if (!computes) return {};
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < hidden; ++column) {
      const auto element = [&](int from, int part) {
        return get(dtype, x, (size_t(from) * 3 + part) * hidden + column);
      };
      double sum = by.weights.bias[column];
      for (int tap = 0; tap < by.taps; ++tap) {
        const int from = row + tap - (by.taps - 1 - by.after);
        if (from < 0 || from >= rows || positions[from] - positions[row] != from - row) continue;
        sum += by.weights.weight[size_t(tap) * hidden + column] * element(from, 0) * element(from, 2);
      }
      put(dtype, y, size_t(row) * hidden + column, sum * element(row, 1));
    }
  }
  return {};
}
Status route_rows(DType dtype, const void* x, const float* weight, int rows, int hidden, const RoutedRows& routed,
                  const Stream&) {
  if (!computes) return {};
  const auto [experts, top_k] = routed.kind;
  for (int row = 0; row < rows; ++row) {
    const Row values = row_of(dtype, x, row, hidden);
    std::vector<std::pair<double, int>> logits;
    for (int expert = 0; expert < experts; ++expert)
      logits.emplace_back(std::inner_product(values.begin(), values.end(), weight + size_t(expert) * hidden, 0.0),
                          expert);
    double total = 0;
    for (const auto& each : logits) total += std::exp(each.first);
    std::stable_sort(logits.begin(), logits.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    for (int i = 0; i < top_k; ++i) {
      const auto [logit, expert] = logits[i];
      routed.routes[size_t(row) * top_k + i] = {expert, float(std::exp(logit) / total)};
      routed.slots[size_t(row) * top_k + i] = expert * rows + row;
    }
  }
  return {};
}
Status combine_rows(DType dtype, const void* x, const void* outputs, const RoutedRows& routed, const float* bias,
                    const Norm& norm, int rows, int hidden, float epsilon, void* y, const Stream&) {
  return map_rows(dtype, x, rows, hidden, y, [&](Row& sum, int row) {
    for (int c = 0; c < hidden; ++c) sum[c] += bias[c];
    for (int i = row * routed.kind.top_k; i < (row + 1) * routed.kind.top_k; ++i) {
      const Row output = row_of(dtype, outputs, routed.slots[i], hidden);
      for (int c = 0; c < hidden; ++c) sum[c] += routed.routes[i].share * output[c];
    }
    normalize(sum, norm, epsilon, nullptr, false);
  });
}
Status rope_rows(DType dtype, void* x, int rows, int pitch, const RopeColumns& of, const Stream&) {
  return map_rows(dtype, x, rows, pitch, x, [&](Row& values, int row) { turn_row(values, of, of.positions[row]); });
}
Status gate_rows(DType dtype, Activation activation, const void* x, int rows, int columns, void* y, const Stream&) {
  if (!computes) return {};
  for (size_t i = 0; i < size_t(rows) * columns; ++i)
    put(dtype, y, i, activated(activation, get(dtype, x, 2 * i)) * get(dtype, x, 2 * i + 1));
  return {};
}
Status gather(DType dtype, const void* context, int context_columns, const RowView& x, const int* cu_seqlens,
              Pooling pooling, int sequences, int hidden, void* context_to, void* x_to, float2* sums_to,
              const Stream&) {
  if (!computes) return {};
  for (int i = 0; i < sequences; ++i) {
    const size_t row = pooling == Pooling::kLast ? cu_seqlens[i + 1] - 1 : cu_seqlens[i];
    put_row(dtype, context_to, i, row_of(dtype, context, row, context_columns));
    put_row(dtype, x_to, i, row_of(dtype, x.data, row, hidden));
    for (int group = 0; x.stats != nullptr && group < groups_of(hidden); ++group)
      sums_to[size_t(i) * groups_of(hidden) + group] = x.stats[row * groups_of(hidden) + group];
  }
  return {};
}
// Vectors as they are: cls, mean or last token.
Status pool(DType dtype, Pooling pooling, const RowView& rows, bool gathered, const Norm& norm, float epsilon,
            const int* cu_seqlens, const uint32_t*, const int*, int sequences, int hidden, float* vectors,
            const Stream&) {
  if (!computes) return {};
  for (int i = 0; i < sequences; ++i) {
    int first = gathered ? i : cu_seqlens[i], end = gathered ? i + 1 : cu_seqlens[i + 1];
    if (pooling == Pooling::kCls) end = first + 1;
    if (pooling == Pooling::kLast) first = end - 1;
    Row all(hidden);
    for (int row = first; row < end; ++row) {
      Row x = row_of(dtype, rows.data, row, hidden);
      normalize(x, norm, epsilon, rows.stats == nullptr ? nullptr : rows.stats + size_t(row) * groups_of(hidden),
                false);
      for (int c = 0; c < hidden; ++c) all[c] += x[c] / (end - first);
    }
    for (int c = 0; c < hidden; ++c) vectors[size_t(i) * hidden + c] = float(all[c]);
  }
  return {};
}
Status token_rows(DType dtype, const void* x, const int*, int rows, int columns, bool, float* y, const Stream&) {
  if (!computes) return {};
  for (size_t i = 0; i < size_t(rows) * columns; ++i) y[i] = float(get(dtype, x, i));
  return {};
}
Status marker_logits(DType dtype, const void* x, const int* ids, const int* cu_seqlens, const int* chosen, int texts,
                     int marker, int hidden, const float* weight, const float* bias, int columns, float* y,
                     const Stream&) {
  for (int i = 0; computes && i < texts; ++i) {
    const int text = chosen == nullptr ? i : chosen[i];
    float* const to = std::fill_n(y + size_t(i) * columns, columns, 0.0f) - columns;
    for (int row = cu_seqlens[text], found = 0; row < cu_seqlens[text + 1] && found < columns; ++row) {
      if (ids[row] != marker) continue;
      const Row values = row_of(dtype, x, row, hidden);
      to[found++] = float(std::inner_product(values.begin(), values.end(), weight, double(*bias)));
    }
  }
  return {};
}
Status convert(DType from, const void* x, DType to, void* y, size_t count, const Stream&) {
  if (!computes) return {};
  for (size_t i = 0; i < count; ++i) put(to, y, i, get(from, x, i));
  return {};
}

bool layernorm_supports(DType, int) {
  return true;
}
bool rmsnorm_supports(DType, int) {
  return true;
}
bool qk_norm_supports(DType, int) {
  return true;
}
bool attention_supports(const AttentionHeads&) {
  return true;
}
double scale_of(const AttentionHeads& shape) {
  return shape.scale == 0.0f ? 1.0 / std::sqrt(double(shape.head_size)) : shape.scale;
}
Status read_build(Build& build, const Stream&) {
  build = faults.build;
  return faults.told_build;
}
Status row_offsets(const RowView&, int, int, float, float*, const Stream&) {
  return {};
}
Status TensorMaps::open() {
  return {};
}

Status vocabulary_mass(DType dtype, const float* x, int rows, const void* matrix, int vocabulary, int hidden, float*,
                       size_t, float* y, const Stream&) {
  for (int row = 0; computes && row < rows; ++row) {
    double sum = 0;
    for (int column = 0; column < vocabulary; ++column) {
      double logit = 0;
      for (int i = 0; i < hidden; ++i)
        logit += x[size_t(row) * hidden + i] * get(dtype, matrix, size_t(column) * hidden + i);
      sum += std::exp(logit);
    }
    y[row] = float(std::log(sum));
  }
  return {};
}

// Kernels of which no result is compared.
namespace {

Status uncomputed() {
  return computes ? Status::refused("the computing device has no such kernel") : Status();
}

class NoMaxima final : public TextMaxima {
 public:
  Status run(const TextRows&, float*, const Stream&) override { return uncomputed(); }
};

}  // namespace
#define EMBERT_UNCOMPUTED(name, ...)        \
  Status name(__VA_ARGS__, const Stream&) { \
    return uncomputed();                    \
  }
EMBERT_UNCOMPUTED(dense, const float*, int, const DenseLayer&, float*, int)
EMBERT_UNCOMPUTED(cut_rows, const float*, const uint32_t*, const int*, int, int, float*)
EMBERT_UNCOMPUTED(max_sims, DType, const void*, int, const int*, int, int, float*)
EMBERT_UNCOMPUTED(token_weights, DType, const RowView&, const Norm&, float, const int*, int, int, const float*,
                  const float*, float*)
EMBERT_UNCOMPUTED(count_pairs, const float*, int, int, int, int*, int*)
Status make_portable_maxima(GemmProvider&, DType, const LinearWeights&, const Stream&,
                            std::unique_ptr<TextMaxima>& maxima) {
  maxima = std::make_unique<NoMaxima>();
  return {};
}
Status begin_maxima(const TextSpan& span, int, int*, float*, int*, const Stream&) {
  tell("begin_maxima chosen=%ld text=%d texts=%d end=%d\n", at(span.chosen), span.first, span.count, span.end_row);
  return uncomputed();
}
// Each text has `pairs_of_text` pairs. Those that do not fit are left out.
Status write_pairs(const float*, int, int, int first, int count, const int*, const int*, const int64_t*, int64_t*,
                   const PairBuffers& to, const Stream&) {
  std::fill_n(to.counts + first, count, pairs_of_text);
  return uncomputed();
}

}  // namespace embert
