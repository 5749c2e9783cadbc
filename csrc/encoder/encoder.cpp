// An encoder's lifetime: the device memory and handles that it allocates at the start and frees at the end.

#include "encoder/encoder.h"

#include <algorithm>
#include <iterator>

#include "encoder/batch.h"

namespace embert {

Status Encoder::create(const EncoderConfig& model, const EncoderOptions& options, std::unique_ptr<Encoder>& created) {
  EMBERT_TRY(model.check());
  if (options.max_tokens < 1 || options.max_tokens > kMaxTokens) {
    return Status::refused("max_batch_tokens must be 1 to ", kMaxTokens, ", found ", options.max_tokens);
  }
  std::unique_ptr<Encoder> encoder(new Encoder(model, options));
  EMBERT_TRY(encoder->init());
  created = std::move(encoder);
  return {};
}

Status Encoder::init() {
  cudaDeviceProp properties{};
  EMBERT_CUDA(cudaGetDeviceProperties(&properties, options_.device));
  EMBERT_TRY(check_capability(properties.name, properties.major, properties.minor));
  EMBERT_CUDA(cudaSetDevice(options_.device));
  EMBERT_CUDA(cudaFree(nullptr));  // creates the context, before memory is measured
  size_t total = 0;
  EMBERT_CUDA(cudaMemGetInfo(&free_before_, &total));
  EMBERT_CUDA(cudaStreamCreateWithFlags(&stream_.handle, cudaStreamNonBlocking));
  EMBERT_CUDA(cudaStreamCreateWithFlags(&uploads_, cudaStreamNonBlocking));
  EMBERT_CUDA(cudaStreamCreateWithFlags(&downloads_, cudaStreamNonBlocking));
  Build build;
  EMBERT_TRY(check_build(properties.major, properties.minor, read_build(build, stream_), build));
  EMBERT_TRY(weights_.allocate());
  if (model_.task_heads.splade) {
    splade_ = std::make_unique<SpladeHead>(
        SpladeShape{*model_.task_heads.splade, model_.hidden, model_.vocabulary, model_.dtype});
    EMBERT_TRY(splade_->allocate());
  }
  EMBERT_TRY(choose_kernels(properties.major == 9 && properties.minor == 0, build));
  EMBERT_TRY(allocate_activations());
  return allocate_slots();
}

Status Encoder::choose_kernels(bool is_hopper, const Build& build) {
  EMBERT_TRY(make_gemm(is_hopper, build));
  stream_.dependent_launch = gemm_->dependent_launch();
  if (is_hopper && model_.dtype != DType::kFloat32 && options_.gemm != "cublaslt") {
    maps_ = std::make_unique<TensorMaps>(model_.dtype);
    EMBERT_TRY(maps_->open());
  }
  // Layers that share weights cannot fold different LayerNorms into them.
  const bool can_fold = model_.int8 ? gemm_->has_int8() : gemm_->folds();  // int8 GEMMs always fold
  folds_ = options_.fold && can_fold && model_.hidden <= kMaxStatColumns && model_.shared.empty();
  if (model_.int8 && !folds_)
    return Status::refused("matrices in int8 need LayerNorms in their products, and ", gemm_->name(),
                           (can_fold ? " was asked for without" : " has no products in int8"));
  program_ = compile(model_, {folds_, gemm_->fuses_rope(), gemm_->fuses_gate()});
  if (folds_ && !model_.int8) weights_.keep_exact();
  return {};
}

Status Encoder::make_gemm(bool is_hopper, const Build& build) {
  const std::string& requested = options_.gemm;
  const bool own = is_hopper && model_.dtype != DType::kFloat32;
  if (requested == "hopper" && !own)
    return Status::refused("the hopper GEMM needs compute capability 9.0 and a 16-bit type");
  if (own && requested != "cublaslt" && !build.hopper) return missing_sm90a(build);
  if (model_.int8 && (!own || requested == "cublaslt"))
    return Status::refused(
        "int8 needs a GPU of compute capability 9.0 and the encoder's own matrix products, which cuda-portable does "
        "not use: choose the dtype float16");
  if (requested == "hopper" || (requested == "auto" && own)) return make_sm90(model_.dtype, gemm_);
  if (requested == "cublaslt" || requested == "auto")
    return make_cublaslt(model_.dtype, options_.cublaslt_library, gemm_);
  return Status::refused("no GEMM is called ", requested);
}

Status Encoder::allocate_activations() {
  row_capacity_ = (options_.max_tokens + 127) / 128 * 128;
  row_capacity_ = std::max(row_capacity_, kTokenBuckets[std::size(kTokenBuckets) - 1]);
  sequence_capacity_ = std::min(row_capacity_, 65535);
  tile_capacity_ = max_tiles(row_capacity_, sequence_capacity_);
  const size_t element = bytes_of(model_.dtype), hidden = model_.hidden, rows = row_capacity_;
  const size_t columns = std::max(program_.widest, model_.task_heads.multi_scratch_columns());
  const size_t head_bytes = size_t(sequence_capacity_) * model_.task_heads.widest(model_.hidden) * sizeof(float);
  for (int pass = 0; pass < 2; ++pass) {
    Arena arena(arena_.as());
    buffers_.x = arena.take(rows * hidden * element);
    buffers_.sum = arena.take(rows * hidden * element);
    buffers_.shared = arena.take(std::max(rows * columns * element, 2 * head_bytes));
    if (folds_) {
      buffers_.x_stats = arena.take<float2>(stats_count(row_capacity_, model_.hidden));
      buffers_.sum_stats = arena.take<float2>(stats_count(row_capacity_, model_.hidden));
    }
    if (model_.int8) {
      buffers_.quantized.data = arena.take<int8_t>(rows * std::max(hidden, size_t(model_.inner)));
      buffers_.quantized.scales = arena.take<float>(rows);
    }
    if (!model_.position_table) buffers_.zeros = arena.take<int>(rows);
    buffers_.offsets.ids = arena.take<int>(rows);
    buffers_.offsets.types = arena.take<int>(rows);
    buffers_.offsets.positions = arena.take<int>(rows);
    buffers_.offsets.cuts = arena.take<uint32_t>(sequence_capacity_);
    buffers_.offsets.cu_seqlens = arena.take<int>(size_t(sequence_capacity_) + 1);
    buffers_.offsets.tiles = arena.take<AttentionTile>(tile_capacity_);
    buffers_.offsets.shorts = arena.take<AttentionTile>(sequence_capacity_);
    if (pass == 0) EMBERT_TRY(arena_.allocate(arena.used()));
  }
  // Batches that are rounded up compute rows that nothing reads. Zeros keep them finite.
  EMBERT_CUDA(cudaMemsetAsync(arena_.as(), 0, arena_.bytes(), stream_.handle));
  return {};
}

Status Encoder::allocate_slots() {
  // Each part of an answer is aligned to a cache line.
  const size_t columns = std::max(model_.width(), model_.task_heads.labels());
  const size_t both = model_.width() + model_.task_heads.labels() + 1;
  const InputLayout input(row_capacity_, sequence_capacity_);
  for (Slot& slot : slots_) {
    EMBERT_TRY(slot.input.allocate(input.bytes));
    if (model_.padding) EMBERT_TRY(slot.positions.allocate(size_t(row_capacity_) * 4));
    EMBERT_TRY(slot.device_input.allocate(input.bytes));
    EMBERT_TRY(slot.direct_output.allocate(kDirectSequences * both * 4));
    const size_t floats = size_t(std::max(row_capacity_ / 16, kDirectSequences)) * columns;
    EMBERT_TRY(reserve(slot, floats, floats, 0));
    if (splade_ != nullptr) EMBERT_TRY(slot.pairs.allocate(model_.vocabulary, sequence_capacity_));
    for (cudaEvent_t* event : {&slot.copied, &slot.computed, &slot.done}) {
      EMBERT_CUDA(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    }
  }
  return {};
}

Encoder::~Encoder() {
  cudaSetDevice(options_.device);
  for (cudaStream_t stream : {stream_.handle, uploads_, downloads_}) {
    if (stream != nullptr) cudaStreamSynchronize(stream);
  }
  for (Slot& slot : slots_) {
    for (const auto& [key, graph] : slot.graphs) cudaGraphExecDestroy(graph);
    for (cudaEvent_t event : {slot.copied, slot.computed, slot.done}) {
      if (event != nullptr) cudaEventDestroy(event);
    }
  }
  gemms_.clear();
  multi_.clear();
  splade_.reset();
  for (cudaStream_t stream : {stream_.handle, uploads_, downloads_}) {
    if (stream != nullptr) cudaStreamDestroy(stream);
  }
}

Status Encoder::record_loss(Status status) {
  if (status.is_lost() && lost_.empty()) lost_ = status.message();
  return status;
}

Status Encoder::load(const std::string& name, int layer, const void* host, const TensorShape& shape, DType stored) {
  EMBERT_CUDA(cudaSetDevice(options_.device));
  const std::string prefix = "splade.";
  if (splade_ != nullptr && layer < 0 && name.compare(0, prefix.size(), prefix) == 0)
    return record_loss(splade_->load(name.substr(prefix.size()), host, shape, stored, stream_));
  return record_loss(weights_.load(name, layer, host, shape, stored, stream_));
}

MemoryUse Encoder::memory_use() const {
  size_t free_now = 0, total = 0;
  cudaMemGetInfo(&free_now, &total);
  size_t activations = arena_.bytes() + gemm_->workspace_bytes();
  for (const Slot& slot : slots_) {
    activations += slot.device_input.bytes() + slot.device_lists.bytes() + slot.vectors.bytes();
  }
  if (splade_ != nullptr) activations += splade_->workspace_bytes();
  const size_t weights = weights_.bytes() + (splade_ == nullptr ? 0 : splade_->weight_bytes());
  return {weights, activations, free_before_ > free_now ? free_before_ - free_now : 0};
}

}  // namespace embert
