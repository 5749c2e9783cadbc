// Loads weights to the device: their types, and the order of their rows.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "encoder/weights.h"
#include "ops/elementwise.h"

namespace embert {
namespace {

// Names of all tensors that a layer may have.
std::vector<std::string> layer_names() {
  std::vector<std::string> names;
  for (const std::string tensor : {"query", "key", "value", "attention", "gate", "inner", "out"}) {
    for (const char* const part : {".weight", ".bias", ".gamma", ".beta", ".scale"}) names.push_back(tensor + part);
  }
  names.insert(names.end(), {"query_norm.gamma", "key_norm.gamma", "attention_sublayer.gamma", "out_sublayer.gamma",
                             "distance_keys", "distance_queries"});
  return names;
}

}  // namespace

Status Weights::exact_place(const std::string& name, int layer, DType stored, float*& to) {
  const size_t hidden = model_.hidden, key = model_.attention_columns() * hidden, keys = model_.key_columns() * hidden;
  // The first element of each: the gate's rows alternate with inner's (weights.h).
  const std::pair<const char*, size_t> places[] = {{"query.weight", 0},
                                                   {"key.weight", key},
                                                   {"value.weight", key + keys},
                                                   {"gate.weight", key + 2 * keys},
                                                   {"inner.weight", key + 2 * keys + (model_.gated ? hidden : 0)}};
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

Status Weights::upload_rows(const void* host, DType stored, const WeightView& place, const Stream& stream) {
  const size_t rows = place.shape[0], columns = place.shape[1], pitch = place.pitch * bytes_of(place.dtype);
  EMBERT_CUDA(cudaMemsetAsync(place.to, 0, rows * pitch, stream.handle));
  for (size_t row = 0; row < rows; ++row) {
    const auto* const from = static_cast<const uint8_t*>(host) + row * columns * bytes_of(stored);
    EMBERT_TRY(upload(from, columns, stored, static_cast<uint8_t*>(place.to) + row * pitch, place.dtype, stream));
  }
  return {};
}

Status Weights::upload_interleaved(const void* host, DType stored, const WeightView& place, float* exact,
                                   const Stream& stream) {
  const size_t rows = place.shape[0], columns = place.shape.size() > 1 ? place.shape[1] : 1;
  const size_t rows_at_once = std::max<size_t>(1, kConvertedElements / columns);
  for (size_t first = 0; first < rows; first += rows_at_once) {
    const size_t some = std::min(rows - first, rows_at_once);
    const auto copy = [&](const void* from, void* to, DType dtype) -> Status {
      const size_t width = columns * bytes_of(dtype), pitch = place.pitch * bytes_of(dtype);
      EMBERT_CUDA(cudaMemcpy2DAsync(static_cast<uint8_t*>(to) + first * pitch, pitch, from, width, width, some,
                                    cudaMemcpyDeviceToDevice, stream.handle));
      return {};
    };
    const void* converted = interleave_scratch_.as();
    EMBERT_TRY(upload(static_cast<const uint8_t*>(host) + first * columns * bytes_of(stored), some * columns, stored,
                      interleave_scratch_.as(), exact == nullptr ? place.dtype : DType::kFloat32, stream));
    if (exact != nullptr) {
      EMBERT_TRY(copy(converted, exact, DType::kFloat32));
      EMBERT_TRY(convert(DType::kFloat32, converted, place.dtype, conversion_.as(), some * columns, stream));
      converted = conversion_.as();
    }
    EMBERT_TRY(copy(converted, place.to, place.dtype));
  }
  return {};
}

const void* Weights::ordered(const std::string& name, int layer, const void* host, size_t row_bytes,
                             std::vector<uint8_t>& memory) const {
  const std::pair<const char*, int> heads_of[] = {{"query.weight", model_.heads},   {"query.bias", model_.heads},
                                                  {"query_norm.gamma", 1},          {"key.weight", model_.key_heads()},
                                                  {"key.bias", model_.key_heads()}, {"key_norm.gamma", 1}};
  const auto* const known =
      std::find_if(std::begin(heads_of), std::end(heads_of), [&](const auto& each) { return name == each.first; });
  if (layer < 0 || known == std::end(heads_of)) return host;
  int user = 0;  // a layer with these weights; all that share them have the same rotary dimension
  while (model_.stored(user) != layer) ++user;
  const int rotary_dim = model_.attention_of(user).rotary_dim;
  if (rotary_dim == 0) return host;
  const int rows = known->second * model_.head_size();
  memory.resize(rows * row_bytes);
  for (int i = 0; i < rows; ++i) {
    const size_t from = rope_row(i, model_.head_size(), rotary_dim);
    std::memcpy(memory.data() + i * row_bytes, static_cast<const uint8_t*>(host) + from * row_bytes, row_bytes);
  }
  return memory.data();
}

Status Weights::load(const std::string& name, int layer, const void* host, const TensorShape& shape, DType stored,
                     const Stream& stream) {
  const auto key = std::make_pair(layer, name);
  if (loaded_.count(key) > 0) return Status::refused(called(name, layer), " was loaded before");
  if (name == "relative" && layer < 0 && model_.relative) {
    EMBERT_TRY(load_relative(host, shape, stored, stream));
  } else if (name == "distances" && layer < 0 && model_.distance_rows > 0) {
    EMBERT_TRY(load_distances(host, shape, stored, stream));
  } else if (name == "angles" && layer >= 0 && size_t(layer) < angles_.size()) {
    EMBERT_TRY(load_angles(layer, host, shape, stored, stream));
  } else {
    WeightView place;
    EMBERT_TRY(find(name, layer, place));
    EMBERT_TRY(check_shape(called(name, layer), shape, place.shape));
    if ((stored == DType::kInt8) != (place.dtype == DType::kInt8))
      return Status::refused(called(name, layer), (place.dtype == DType::kInt8 ? " must be in int8" : " is in int8"));
    EMBERT_TRY(load_into(place, name, layer, host, stored, stream));
  }
  loaded_.insert(key);
  return {};
}

Status Weights::load_into(const WeightView& place, const std::string& name, int layer, const void* host, DType stored,
                          const Stream& stream) {
  const size_t count = elements_of(place.shape);
  if (!place.interleaved && place.pitch > 0 && place.pitch != place.shape[1])
    return upload_rows(host, stored, place, stream);
  std::vector<uint8_t> memory;
  const void* const from = ordered(name, layer, host, count / place.shape[0] * bytes_of(stored), memory);
  float* exact = nullptr;
  EMBERT_TRY(exact_place(name, layer, stored, exact));
  if (place.interleaved) {
    EMBERT_TRY(upload_interleaved(from, stored, place, exact, stream));
  } else if (exact == nullptr) {
    EMBERT_TRY(upload(from, count, stored, place.to, place.dtype, stream));
  } else {
    EMBERT_TRY(upload(from, count, stored, exact, DType::kFloat32, stream));
    EMBERT_TRY(convert(DType::kFloat32, exact, place.dtype, place.to, count, stream));
  }
  if (!memory.empty()) EMBERT_CUDA(cudaStreamSynchronize(stream.handle));  // it is freed here
  return {};
}

// Distances that only masked scores have are 0. The others are multiplied by √d, because the kernels scale after the
// addition.
Status Weights::load_relative(const void* host, const TensorShape& shape, DType stored, const Stream& stream) {
  const int heads = model_.heads, reach = model_.reach(), stored_reach = model_.positions - 1;
  const int row = 2 * stored_reach + 1;
  EMBERT_TRY(check_shape("relative", shape, {size_t(heads), size_t(row)}));
  if (stored != DType::kFloat32) return Status::refused("relative must be in float32");
  std::vector<float> scores(size_t(heads) * 2 * reach);
  const float scale = float(std::sqrt(double(model_.head_size())));
  for (int head = 0; head < heads; ++head) {
    const float* const from = static_cast<const float*>(host) + size_t(head) * row;
    float* const to = scores.data() + size_t(2 * head + 1) * reach - stored_reach;
    for (int i = 0; i < row; ++i) to[i] = from[i] * scale;
  }
  EMBERT_CUDA(cudaMemcpyAsync(relative_, scores.data(), scores.size() * 4, cudaMemcpyHostToDevice, stream.handle));
  EMBERT_CUDA(cudaStreamSynchronize(stream.handle));
  return {};
}

Status Weights::load_distances(const void* host, const TensorShape& shape, DType stored, const Stream& stream) {
  EMBERT_TRY(check_shape("distances", shape, {2 * size_t(model_.positions) - 1}));
  if (stored != DType::kFloat32) return Status::refused("distances must be in float32");
  const auto* const from = static_cast<const float*>(host);
  std::vector<int16_t> rows(shape[0]);
  for (size_t i = 0; i < rows.size(); ++i) {
    if (!(from[i] >= 0 && from[i] < float(model_.distance_rows)))
      return Status::refused("distances has an element of ", from[i], ", which is not a row of ", model_.distance_rows);
    rows[i] = int16_t(from[i]);
  }
  EMBERT_CUDA(
      cudaMemcpyAsync(distances_, rows.data(), rows.size() * sizeof(int16_t), cudaMemcpyHostToDevice, stream.handle));
  EMBERT_CUDA(cudaStreamSynchronize(stream.handle));
  return {};
}

Status Weights::load_angles(int table, const void* host, const TensorShape& shape, DType stored, const Stream& stream) {
  EMBERT_TRY(
      check_shape(called("angles", table), shape, {size_t(model_.positions), size_t(model_.angle_tables()[table]), 2}));
  if (stored != DType::kFloat32) return Status::refused("angles must be in float32");
  return upload(host, elements_of(shape), stored, angles_[table], DType::kFloat32, stream);
}

Status Weights::complete() {
  std::vector<std::pair<int, std::string>> expected = {{-1, "word"}};
  if (model_.embedding_norm) expected.insert(expected.end(), {{-1, "gamma"}, {-1, "beta"}});
  if (model_.position_table) expected.emplace_back(-1, "position");
  if (model_.padding) expected.emplace_back(-1, "padding");
  if (model_.types > 0) expected.emplace_back(-1, "type");
  if (model_.relative) expected.emplace_back(-1, "relative");
  if (model_.distance_rows > 0) expected.emplace_back(-1, "distances");
  if (model_.embedding > 0) expected.insert(expected.end(), {{-1, "projection.weight"}, {-1, "projection.bias"}});
  if (model_.pre_norm) expected.insert(expected.end(), {{-1, "last.gamma"}, {-1, "last.beta"}});
  for (size_t table = 0; table < angles_.size(); ++table) expected.emplace_back(int(table), "angles");
  WeightView place;
  for (int layer = 0; layer < model_.stored_layers(); ++layer) {
    for (const std::string& name : layer_names()) {
      if (find_layer(name, layer, place)) expected.emplace_back(layer, name);
    }
  }
  for (const auto& each : heads_.names()) expected.push_back(each);
  for (const auto& [layer, name] : expected) {
    if (loaded_.count({layer, name}) > 0) continue;
    return Status::refused(called(name, layer), " was not loaded: of ", expected.size(), " weights there are ",
                           loaded_.size());
  }
  conversion_.release();
  interleave_scratch_.release();
  return {};
}

}  // namespace embert
