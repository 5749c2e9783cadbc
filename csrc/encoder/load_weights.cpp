// Loads weights to the device: their types, and the order of their rows.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "encoder/weights.h"
#include "ops/elementwise.h"

namespace embert {
namespace {

// Returns an error unless the tensor has this shape.
Status check_shape(const std::string& name, const TensorShape& shape, const TensorShape& expected) {
  if (shape == expected) return {};
  const auto written = [](const TensorShape& sizes) {
    std::string all;
    for (const size_t size : sizes) all += (all.empty() ? "[" : ", ") + std::to_string(size);
    return all + "]";
  };
  return Status::refused(name, " has shape ", written(shape), ", expected ", written(expected));
}

}  // namespace

Status Weights::exact_copy(const std::string& name, int layer, DType stored, float*& to) {
  const AttentionHeads heads = model_.attention_heads(layer);
  const size_t hidden = model_.hidden, key = heads.columns() * hidden, keys = heads.key_columns() * hidden;
  const size_t inner = model_.qkv_columns(layer) * hidden;
  // The first element of each: the gate's rows alternate with inner's (weights.h).
  const std::pair<const char*, size_t> places[] = {
      {"query.weight", 0},       {"key.weight", key},    {"value.weight", key + keys},
      {"convolution.weight", 0}, {"gate.weight", inner}, {"inner.weight", inner + (model_.gated ? hidden : 0)}};
  const auto* const position =
      std::find_if(std::begin(places), std::end(places), [&](const auto& each) { return name == each.first; });
  const bool is_matrix = position != std::end(places);
  // With norms after both parts, no GEMM multiplies rows by a gamma in 16 bits.
  const bool is_gamma = !model_.sublayer_norms && (name == "gamma" || name == "attention.gamma" || name == "out.gamma");
  if (!keeps_exact_ || !(is_matrix || is_gamma)) return {};
  // BF16 counts as exact in FP16: values below 2⁻¹⁷ lose at most 2⁻²⁵, and a tensor to which that matters, or with an
  // element above 65 504, is not loaded as FP16 (engine/encoders/cuda/weights.py).
  if (stored != model_.dtype && !(stored == DType::kBFloat16 && model_.dtype == DType::kFloat16)) ++rounded_;
  if (is_gamma) return {};
  if (exact_.bytes() == 0) EMBERT_TRY(exact_.allocate(exact_count() * model_.stored_layers() * sizeof(float)));
  to = exact_.as<float>() + layer * exact_count() + position->second;
  return {};
}

Status Weights::upload_rows(const void* host, DType stored, const WeightView& view, const Stream& stream) {
  const size_t rows = view.shape[0], columns = view.shape[1], pitch = view.pitch * bytes_of(view.dtype);
  EMBERT_CUDA(cudaMemsetAsync(view.to, 0, rows * pitch, stream.handle));
  for (size_t row = 0; row < rows; ++row) {
    const auto* const from = static_cast<const uint8_t*>(host) + row * columns * bytes_of(stored);
    EMBERT_TRY(upload(from, columns, stored, static_cast<uint8_t*>(view.to) + row * pitch, view.dtype, stream));
  }
  return {};
}

Status Weights::upload_interleaved(const void* host, DType stored, const WeightView& view, float* exact,
                                   const Stream& stream) {
  const size_t rows = view.shape[0], columns = view.shape.size() > 1 ? view.shape[1] : 1;
  const size_t rows_at_once = std::max<size_t>(1, kConvertedElements / columns);
  for (size_t first = 0; first < rows; first += rows_at_once) {
    const size_t some = std::min(rows - first, rows_at_once);
    const auto copy = [&](const void* from, void* to, DType dtype) -> Status {
      const size_t width = columns * bytes_of(dtype), pitch = view.pitch * bytes_of(dtype);
      EMBERT_CUDA(cudaMemcpy2DAsync(static_cast<uint8_t*>(to) + first * pitch, pitch, from, width, width, some,
                                    cudaMemcpyDeviceToDevice, stream.handle));
      return {};
    };
    const void* converted = interleave_scratch_.as();
    EMBERT_TRY(upload(static_cast<const uint8_t*>(host) + first * columns * bytes_of(stored), some * columns, stored,
                      interleave_scratch_.as(), exact == nullptr ? view.dtype : DType::kFloat32, stream));
    if (exact != nullptr) {
      EMBERT_TRY(copy(converted, exact, DType::kFloat32));
      EMBERT_TRY(convert(DType::kFloat32, converted, view.dtype, conversion_.as(), some * columns, stream));
      converted = conversion_.as();
    }
    EMBERT_TRY(copy(converted, view.to, view.dtype));
  }
  return {};
}

const void* Weights::ordered(const std::string& name, int layer, const void* host, size_t row_bytes,
                             std::vector<uint8_t>& memory) const {
  const AttentionHeads heads = model_.attention_heads(layer);
  const std::pair<const char*, int> heads_of[] = {{"query.weight", heads.heads}, {"query.bias", heads.heads},
                                                  {"query_norm.gamma", 1},       {"key.weight", heads.kv_heads},
                                                  {"key.bias", heads.kv_heads},  {"key_norm.gamma", 1}};
  const auto* const known =
      std::find_if(std::begin(heads_of), std::end(heads_of), [&](const auto& each) { return name == each.first; });
  if (layer < 0 || known == std::end(heads_of)) return host;
  int user = 0;  // a layer with these weights; all that share them have the same rotary dimension
  while (model_.stored(user) != layer) ++user;
  const int rotary_dim = model_.attention_of(user).rotary_dim;
  if (rotary_dim == 0) return host;
  const int rows = known->second * heads.head_size;
  memory.resize(rows * row_bytes);
  for (int i = 0; i < rows; ++i) {
    const size_t from = rope_row(i, heads.head_size, rotary_dim);
    std::memcpy(memory.data() + i * row_bytes, static_cast<const uint8_t*>(host) + from * row_bytes, row_bytes);
  }
  return memory.data();
}

Status Weights::load(const std::string& name, int layer, const void* host, const TensorShape& shape, DType stored,
                     const Stream& stream) {
  const auto key = std::make_pair(layer, name);
  if (loaded_.count(key) > 0) return Status::refused(called(name, layer), " was loaded before");
  const auto found = tensors_.find(key);
  if (found == tensors_.end()) return Status::refused("this model has no weight ", called(name, layer));
  const WeightView& view = found->second;
  EMBERT_TRY(check_shape(called(name, layer), shape, view.shape));
  if ((stored == DType::kInt8) != (view.dtype == DType::kInt8))
    return Status::refused(called(name, layer), (view.dtype == DType::kInt8 ? " must be in int8" : " is in int8"));
  const bool is_table = name == "relative" || name == "distances" || name == "angles";
  if (is_table && stored != DType::kFloat32) return Status::refused(called(name, layer), " must be in float32");
  if (name == "relative") {
    EMBERT_TRY(load_relative(static_cast<const float*>(host), stream));
  } else if (name == "distances") {
    EMBERT_TRY(load_distances(static_cast<const float*>(host), stream));
  } else {
    EMBERT_TRY(load_into(view, name, layer, host, stored, stream));
  }
  loaded_.insert(key);
  return {};
}

Status Weights::load_into(const WeightView& view, const std::string& name, int layer, const void* host, DType stored,
                          const Stream& stream) {
  const size_t count = elements_of(view.shape);
  if (!view.interleaved && view.pitch > 0 && view.pitch != view.shape[1])
    return upload_rows(host, stored, view, stream);
  std::vector<uint8_t> memory;
  const void* const from = ordered(name, layer, host, count / view.shape[0] * bytes_of(stored), memory);
  float* exact = nullptr;
  EMBERT_TRY(exact_copy(name, layer, stored, exact));
  if (view.interleaved) {
    EMBERT_TRY(upload_interleaved(from, stored, view, exact, stream));
  } else if (exact == nullptr) {
    EMBERT_TRY(upload(from, count, stored, view.to, view.dtype, stream));
  } else {
    EMBERT_TRY(upload(from, count, stored, exact, DType::kFloat32, stream));
    EMBERT_TRY(convert(DType::kFloat32, exact, view.dtype, view.to, count, stream));
  }
  if (!memory.empty()) EMBERT_CUDA(cudaStreamSynchronize(stream.handle));  // it is freed here
  return {};
}

// Distances that only masked scores have are 0. The others are multiplied by √d, because the kernels scale after the
// addition.
Status Weights::load_relative(const float* host, const Stream& stream) {
  const int heads = model_.heads, reach = model_.reach(), stored_reach = model_.positions - 1;
  const int row = 2 * stored_reach + 1;
  std::vector<float> scores(size_t(heads) * 2 * reach);
  const float scale = float(std::sqrt(double(model_.head_size())));
  for (int head = 0; head < heads; ++head) {
    const float* const from = host + size_t(head) * row;
    float* const to = scores.data() + size_t(2 * head + 1) * reach - stored_reach;
    for (int i = 0; i < row; ++i) to[i] = from[i] * scale;
  }
  EMBERT_CUDA(cudaMemcpyAsync(relative_, scores.data(), scores.size() * 4, cudaMemcpyHostToDevice, stream.handle));
  EMBERT_CUDA(cudaStreamSynchronize(stream.handle));
  return {};
}

Status Weights::load_distances(const float* host, const Stream& stream) {
  std::vector<int16_t> rows(2 * size_t(model_.positions) - 1);
  for (size_t i = 0; i < rows.size(); ++i) {
    if (!(host[i] >= 0 && host[i] < float(model_.distance_rows)))
      return Status::refused("distances has an element of ", host[i], ", which is not a row of ", model_.distance_rows);
    rows[i] = int16_t(host[i]);
  }
  EMBERT_CUDA(
      cudaMemcpyAsync(distances_, rows.data(), rows.size() * sizeof(int16_t), cudaMemcpyHostToDevice, stream.handle));
  EMBERT_CUDA(cudaStreamSynchronize(stream.handle));
  return {};
}

Status Weights::complete() {
  for (const auto& [key, view] : tensors_) {
    if (loaded_.count(key) > 0) continue;
    return Status::refused(called(key.second, key.first), " was not loaded: of ", tensors_.size(),
                           " weights there are ", loaded_.size());
  }
  conversion_.release();
  interleave_scratch_.release();
  return {};
}

}  // namespace embert
