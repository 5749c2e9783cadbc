#include "encoder.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <iterator>

namespace embert {
namespace {

// Batches up to the last of these many tokens run as captured graphs, rounded up to the next one; and sequences
// likewise.
constexpr int kTokenBuckets[] = {16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024};
constexpr int kSequenceBuckets[] = {1, 8, 32, 64};

// Answers for up to this many sequences are written straight into host memory by the pooling kernel: no copy to launch.
constexpr int kDirectSequences = 64;
static_assert(kSequenceBuckets[std::size(kSequenceBuckets) - 1] <= kDirectSequences, "graphs write directly");

template <size_t n>
int round_up(const int (&buckets)[n], int value) {
  const int* const found = std::lower_bound(buckets, buckets + n, value);
  return found == buckets + n ? 0 : *found;
}

// At most this many attention tiles, whatever the lengths: a tile has over 32 tokens, or 64.
int max_tiles(int tokens, int sequences) {
  return std::min(tokens / kAttentionRows + std::min(sequences, tokens / (kAttentionShort + 1)), tokens);
}

// A batch of so many tokens may be one long text's tiles and nothing else, and still be launched.
constexpr int kMostTokens = kMostAttentionTiles * kAttentionRows;

std::atomic<int64_t> last_ticket{0};

}  // namespace

Status Encoder::create(const ModelShape& shape, const EncoderOptions& options, std::unique_ptr<Encoder>& made) {
  EMBERT_TRY(shape.check());
  if (options.max_tokens < 1 || options.max_tokens > kMostTokens) {
    return Status::refused("max_batch_tokens must be 1 to " + std::to_string(kMostTokens) + ", found " +
                           std::to_string(options.max_tokens));
  }
  std::unique_ptr<Encoder> encoder(new Encoder(shape, options));
  EMBERT_TRY(encoder->init());
  made = std::move(encoder);
  return {};
}

Status Encoder::init() {
  cudaDeviceProp properties{};
  EMBERT_CUDA(cudaGetDeviceProperties(&properties, options_.device));
  EMBERT_TRY(check_capability(properties.name, properties.major, properties.minor));
  EMBERT_CUDA(cudaSetDevice(options_.device));
  EMBERT_CUDA(cudaFree(nullptr));  // the context, before memory is counted
  size_t total = 0;
  EMBERT_CUDA(cudaMemGetInfo(&free_before_, &total));
  EMBERT_CUDA(cudaStreamCreateWithFlags(&stream_.handle, cudaStreamNonBlocking));
  EMBERT_CUDA(cudaStreamCreateWithFlags(&uploads_, cudaStreamNonBlocking));
  EMBERT_CUDA(cudaStreamCreateWithFlags(&downloads_, cudaStreamNonBlocking));
  Build build;
  EMBERT_TRY(check_build(properties.major, properties.minor, read_build(build, stream_), build));
  EMBERT_TRY(weights_.allocate());

  const bool is_hopper = properties.major == 9 && properties.minor == 0;
  EMBERT_TRY(make_gemm(is_hopper, build));
  stream_.dependent_launch = gemm_->dependent_launch();
  if (is_hopper && shape_.dtype != DType::kFloat32 && options_.gemm != "cublaslt") {
    maps_ = std::make_unique<TensorMaps>(shape_.dtype);
    EMBERT_TRY(maps_->open());
  }
  folds_ = options_.fold && gemm_->folds() && shape_.hidden <= kMaxSumColumns;
  if (folds_) weights_.keep_exact();

  row_capacity_ = (options_.max_tokens + 127) / 128 * 128;
  row_capacity_ = std::max(row_capacity_, kTokenBuckets[std::size(kTokenBuckets) - 1]);
  sequence_capacity_ = std::min(row_capacity_, 65535);
  tile_capacity_ = max_tiles(row_capacity_, sequence_capacity_);
  const size_t element = bytes_of(shape_.dtype), hidden = shape_.hidden, rows = row_capacity_;
  for (int pass = 0; pass < 2; ++pass) {
    Carver carver(arena_.as());
    at_.x = carver.take(rows * hidden * element);
    at_.sum = carver.take(rows * hidden * element);
    at_.wide = carver.take(rows * std::max<size_t>(4 * hidden, shape_.inner) * element);
    if (folds_) {
      at_.x_sums = reinterpret_cast<float2*>(carver.take(sums_bytes(row_capacity_, shape_.hidden)));
      at_.sum_sums = reinterpret_cast<float2*>(carver.take(sums_bytes(row_capacity_, shape_.hidden)));
    }
    at_.offsets.ids = reinterpret_cast<int*>(carver.take(rows * 4));
    at_.offsets.types = reinterpret_cast<int*>(carver.take(rows * 4));
    at_.offsets.positions = reinterpret_cast<int*>(carver.take(rows * 4));
    at_.offsets.cuts = reinterpret_cast<uint32_t*>(carver.take(size_t(sequence_capacity_) * 4));
    at_.offsets.cu_seqlens = reinterpret_cast<int*>(carver.take((size_t(sequence_capacity_) + 1) * 4));
    at_.offsets.tiles = reinterpret_cast<AttentionTile*>(carver.take(size_t(tile_capacity_) * sizeof(AttentionTile)));
    at_.offsets.shorts =
        reinterpret_cast<AttentionTile*>(carver.take(size_t(sequence_capacity_) * sizeof(AttentionTile)));
    if (pass == 0) EMBERT_TRY(arena_.allocate(carver.used()));
  }
  // Rounded-up batches compute rows that nobody reads; finite ones are easier to reason about.
  EMBERT_CUDA(cudaMemsetAsync(arena_.as(), 0, arena_.bytes(), stream_.handle));

  const InputLayout input(row_capacity_, sequence_capacity_);
  for (Slot& slot : slots_) {
    EMBERT_TRY(slot.input.allocate(input.bytes));
    if (shape_.padding) EMBERT_TRY(slot.positions.allocate(rows * 4));
    EMBERT_TRY(slot.device_input.allocate(input.bytes));
    EMBERT_TRY(slot.direct_output.allocate(kDirectSequences * hidden * 4));
    EMBERT_TRY(reserve_output(slot, size_t(std::max(row_capacity_ / 16, kDirectSequences)) * hidden, true));
    for (cudaEvent_t* event : {&slot.copied, &slot.computed, &slot.done}) {
      EMBERT_CUDA(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    }
  }
  return {};
}

Status Encoder::make_gemm(bool is_hopper, const Build& build) {
  const std::string& asked = options_.gemm;
  const bool own = is_hopper && shape_.dtype != DType::kFloat32;
  if (asked == "hopper" && !own)
    return Status::refused("the hopper GEMM needs compute capability 9.0 and a 16-bit type");
  if (own && asked != "cublaslt" && !build.hopper) return without_hopper(build);
  if (asked == "hopper" || (asked == "auto" && own)) return make_hopper(shape_.dtype, gemm_);
  if (asked == "cublaslt" || asked == "auto") return make_cublaslt(shape_.dtype, options_.cublaslt_library, gemm_);
  return Status::refused("no GEMM is called " + asked);
}

Encoder::~Encoder() {
  cudaSetDevice(options_.device);
  for (cudaStream_t stream : {stream_.handle, uploads_, downloads_}) {
    if (stream != nullptr) cudaStreamSynchronize(stream);
  }
  for (Slot& slot : slots_) {
    for (const auto& [bucket, graph] : slot.graphs) cudaGraphExecDestroy(graph);
    for (cudaEvent_t event : {slot.copied, slot.computed, slot.done}) {
      if (event != nullptr) cudaEventDestroy(event);
    }
  }
  products_.clear();
  for (cudaStream_t stream : {stream_.handle, uploads_, downloads_}) {
    if (stream != nullptr) cudaStreamDestroy(stream);
  }
}

Status Encoder::remember(Status status) {
  if (status.is_lost() && lost_.empty()) lost_ = status.message();
  return status;
}

Status Encoder::load(const std::string& name, int layer, const void* host, const TensorShape& shape, DType stored) {
  EMBERT_CUDA(cudaSetDevice(options_.device));
  return remember(weights_.load(name, layer, host, shape, stored, stream_));
}

Status Encoder::start(std::string& fold_refusal) {
  EMBERT_CUDA(cudaSetDevice(options_.device));
  EMBERT_CUDA(cudaStreamSynchronize(stream_.handle));
  EMBERT_TRY(weights_.complete());
  const int hidden = shape_.hidden;
  gamma_in_rows_ = folds_ && weights_.has_what_is_stored();
  products_.resize(shape_.layers);
  for (int i = 0; i < shape_.layers; ++i) {
    const LayerWeights& w = weights_.layer(i);
    LayerProducts& p = products_[i];
    // The LayerNorms before the layer and inside it, where the products take them over.
    Norm before, inside;
    if (folds_) {
      before = i == 0 ? weights_.tables().norm : weights_.layer(i - 1).out_norm;
      inside = w.attention_norm;
    }
    const float epsilon = shape_.epsilon;
    const int inner = shape_.inner;
    LinearWeights qkv{w.qkv_weight, w.qkv_bias, 3 * hidden, hidden, Activation::kNone, before, {}, epsilon};
    LinearWeights attention_out{
        w.attention_weight, w.attention_bias, hidden, hidden, Activation::kNone, {}, before, epsilon};
    LinearWeights wide{w.inner_weight, w.inner_bias, inner, hidden, shape_.activation, inside, {}, epsilon};
    LinearWeights out{w.out_weight, w.out_bias, hidden, inner, Activation::kNone, {}, inside, epsilon};
    if (gamma_in_rows_) {
      for (LinearWeights* each : {&qkv, &attention_out, &wide, &out}) each->gamma_in_rows = true;
      attention_out.next_gamma = inside.gamma;
      if (i + 1 < shape_.layers) out.next_gamma = w.out_norm.gamma;  // no product reads the last layer's rows
    } else if (folds_) {
      qkv.exact = weights_.exact_qkv(i);
      wide.exact = weights_.exact_inner(i);
    }
    // Two products ahead; the last layer's are followed by the next batch's first.
    const LayerWeights& after = weights_.layer((i + 1) % shape_.layers);
    const size_t element = bytes_of(shape_.dtype);
    qkv.ahead = w.inner_weight, qkv.ahead_bytes = size_t(inner) * hidden * element;
    attention_out.ahead = w.out_weight, attention_out.ahead_bytes = size_t(inner) * hidden * element;
    wide.ahead = after.qkv_weight, wide.ahead_bytes = size_t(3 * hidden) * hidden * element;
    out.ahead = after.attention_weight, out.ahead_bytes = size_t(hidden) * hidden * element;
    EMBERT_TRY(gemm_->prepare(qkv, stream_, p.qkv));
    EMBERT_TRY(gemm_->prepare(attention_out, stream_, p.attention_out));
    std::unique_ptr<Linear> first, second;
    EMBERT_TRY(gemm_->prepare(wide, stream_, first));
    EMBERT_TRY(gemm_->prepare(out, stream_, second));
    EMBERT_TRY(gemm_->join(std::move(first), std::move(second), p.feed_forward));
  }
  EMBERT_CUDA(cudaStreamSynchronize(stream_.handle));
  weights_.forget_exact();
  if (folds_) {
    const Status folded = gemm_->check_folds();
    if (folded.is_lost()) return folded;
    fold_refusal = folded.message();
    if (!folded.ok()) return {};
  }

  // Full batches, so that every kernel is loaded before the first request. Of tokens from all over the vocabulary: the
  // first one's rows are looked at.
  const int length = std::min(shape_.max_length(), options_.max_tokens);
  const int sequences = std::max(1, options_.max_tokens / length);
  std::vector<int32_t> ids(size_t(sequences) * length), cu_seqlens(sequences + 1);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = int32_t(i * shape_.vocabulary / ids.size());
  for (int i = 0; i <= sequences; ++i) cu_seqlens[i] = i * length;
  std::vector<float> out(size_t(sequences) * hidden);
  BatchView batch;
  batch.tokens = sequences * length;
  batch.sequences = sequences;
  batch.ids = ids.data();
  batch.cu_seqlens = cu_seqlens.data();
  if (folds_) {
    EMBERT_TRY(largest_offset_.allocate(sizeof(float)));
    EMBERT_CUDA(cudaMemsetAsync(largest_offset_.as(), 0, sizeof(float), stream_.handle));
  }
  for (int round = 0; round < kSlots; ++round) {
    int64_t ticket = 0;
    EMBERT_TRY(submit(batch, Task::kEmbed, ticket));
    EMBERT_TRY(wait(ticket, out.data()));
    if (largest_offset_.bytes() > 0) EMBERT_TRY(check_offset(fold_refusal));
    if (!fold_refusal.empty()) return {};
  }
  if (!options_.graphs) return {};
  for (Slot& slot : slots_) {
    for (int tokens : kTokenBuckets) {
      for (int count : kSequenceBuckets) {
        if (count <= tokens) EMBERT_TRY(remember(capture(slot, {tokens, count})));
      }
    }
  }
  EMBERT_CUDA(cudaStreamSynchronize(stream_.handle));
  return {};
}

Status Encoder::check_offset(std::string& fold_refusal) {
  float largest = 0.0f;
  EMBERT_CUDA(cudaMemcpy(&largest, largest_offset_.as(), sizeof(largest), cudaMemcpyDeviceToHost));
  largest_offset_.release();
  const std::string refusal = "LayerNorm cannot be folded into the products: a row before it ";
  if (std::isinf(largest)) {
    // With gamma in the rows, gamma times a row may be beyond the type's range where the row is not. If the model
    // itself is, it is so without folding, too, and its requests are told.
    fold_refusal = refusal + "is not finite";
  } else if (largest > kMostOffset) {
    fold_refusal = refusal + "has a mean of " + std::to_string(largest) + " deviations, at most " +
                   std::to_string(int(kMostOffset)) + " is taken";
  }
  return {};
}

bool Encoder::bucket_of(const BatchView& batch, std::pair<int, int>& bucket) {
  bucket = {round_up(kTokenBuckets, batch.tokens), round_up(kSequenceBuckets, batch.sequences)};
  return bucket.first != 0 && bucket.second != 0;
}

Status Encoder::reserve_output(Slot& slot, size_t floats, bool on_device) {
  if (slot.output.bytes() < floats * 4) EMBERT_TRY(slot.output.allocate(floats * 4));
  if (on_device && slot.vectors.bytes() < floats * 4) EMBERT_TRY(slot.vectors.allocate(floats * 4));
  return {};
}

const Encoder::Slot* Encoder::find_slot(int64_t ticket) const {
  for (const Slot& slot : slots_) {
    if (slot.in_flight && slot.ticket == ticket) return &slot;
  }
  return nullptr;
}

Status Encoder::come_to_rest(Status failed) {
  if (failed.is_lost()) return remember(failed);
  cudaGetLastError();  // or a later launch would be told of it
  for (const cudaStream_t stream : {uploads_, stream_.handle, downloads_}) {
    const Status rested = remember(Status::cuda(cudaStreamSynchronize(stream), "after a batch that was refused"));
    if (!rested.ok()) return rested;
  }
  return failed;
}

Status Encoder::submit(const BatchView& batch, Task task, int64_t& ticket) {
  if (!lost_.empty()) return Status::lost("the encoder was lost earlier: " + lost_);
  EMBERT_TRY(check_batch(batch, shape_, options_.max_tokens, sequence_capacity_));
  EMBERT_TRY(remember(Status::cuda(cudaSetDevice(options_.device), "cudaSetDevice")));
  Slot* slot = nullptr;
  for (Slot& one : slots_) {
    if (!one.in_flight) slot = &one;
  }
  if (slot == nullptr) return Status::refused("two batches are in flight already");
  slot->rows = task == Task::kEmbed ? batch.sequences : batch.tokens;
  if (batch.tokens > 0) {
    std::pair<int, int> bucket;
    // A graph's positions are those of offsets.cu.
    const bool small = task == Task::kEmbed && batch.positions == nullptr && bucket_of(batch, bucket) &&
                       slot->graphs.count(bucket) > 0;
    Plan plan{};
    if (!small) EMBERT_TRY(plan_large(*slot, batch, task, plan));
    const Status queued = small ? submit_small(*slot, batch, bucket) : submit_large(*slot, batch, plan, task);
    if (!queued.ok()) return come_to_rest(queued);
  }
  slot->in_flight = true;
  slot->ticket = ticket = ++last_ticket;
  return {};
}

Status Encoder::submit_small(Slot& slot, const BatchView& batch, std::pair<int, int> bucket) {
  write_batch(batch, InputLayout(bucket.first, bucket.second), slot.input.as());
  slot.direct = true;
  EMBERT_CUDA(cudaGraphLaunch(slot.graphs.at(bucket), stream_.handle));
  EMBERT_CUDA(cudaEventRecord(slot.done, stream_.handle));
  return {};
}

Status Encoder::plan_large(Slot& slot, const BatchView& batch, Task task, Plan& plan) {
  plan = {batch.tokens, batch.sequences, 0, 0, 0, slot.device_input.as(), nullptr};
  for (int i = 0; i < batch.sequences; ++i) {
    const int length = batch.cu_seqlens[i + 1] - batch.cu_seqlens[i];
    plan.longest = std::max(plan.longest, length);
    if (length <= kAttentionShort) {
      ++plan.shorts;
    } else {
      plan.tiles += (length + kAttentionRows - 1) / kAttentionRows;
    }
  }
  EMBERT_TRY(check_attention_work(plan.tiles, plan.shorts));
  slot.direct = task == Task::kEmbed && batch.sequences <= kDirectSequences;
  if (!slot.direct) {
    const Status reserved = reserve_output(slot, size_t(slot.rows) * shape_.hidden, task == Task::kEmbed);
    if (!reserved.ok()) return come_to_rest(reserved);
  }
  if (task == Task::kEmbed) plan.vectors = slot.direct ? slot.direct_output.as<float>() : slot.vectors.as<float>();
  if (batch.positions != nullptr) {
    std::memcpy(slot.positions.as(), batch.positions, 4 * size_t(batch.tokens));
    plan.positions = slot.positions.as<int>();
  }
  return {};
}

Status Encoder::submit_large(Slot& slot, const BatchView& batch, const Plan& plan, Task task) {
  const InputLayout layout(batch.tokens, batch.sequences);
  write_batch(batch, layout, slot.input.as());
  EMBERT_CUDA(cudaMemcpyAsync(slot.device_input.as(), slot.input.as(), layout.bytes, cudaMemcpyHostToDevice, uploads_));
  EMBERT_CUDA(cudaEventRecord(slot.copied, uploads_));
  EMBERT_CUDA(cudaStreamWaitEvent(stream_.handle, slot.copied));
  const size_t floats = size_t(slot.rows) * shape_.hidden;
  if (task == Task::kTokens) {
    EMBERT_TRY(forward(plan, stream_));
    // The hidden states go through the room of the wide activations, which the next forward will want: so on this
    // stream.
    EMBERT_TRY(convert(shape_.dtype, at_.x, DType::kFloat32, at_.wide, floats, stream_));
    EMBERT_CUDA(cudaMemcpyAsync(slot.output.as(), at_.wide, floats * 4, cudaMemcpyDeviceToHost, stream_.handle));
    EMBERT_CUDA(cudaEventRecord(slot.done, stream_.handle));
    return {};
  }
  EMBERT_TRY(forward(plan, stream_));
  if (slot.direct) {
    EMBERT_CUDA(cudaEventRecord(slot.done, stream_.handle));
    return {};
  }
  EMBERT_CUDA(cudaEventRecord(slot.computed, stream_.handle));
  EMBERT_CUDA(cudaStreamWaitEvent(downloads_, slot.computed));
  EMBERT_CUDA(cudaMemcpyAsync(slot.output.as(), slot.vectors.as(), floats * 4, cudaMemcpyDeviceToHost, downloads_));
  EMBERT_CUDA(cudaEventRecord(slot.done, downloads_));
  return {};
}

Status Encoder::capture(Slot& slot, std::pair<int, int> bucket) {
  const auto [tokens, sequences] = bucket;
  Plan plan{tokens,
            sequences,
            max_tiles(tokens, sequences),
            sequences,
            std::min(tokens, shape_.max_length()),
            slot.input.as(),
            slot.direct_output.as<float>(),
            true};
  if (sequences == 1) {  // one sequence is short or long, and the bucket tells
    plan.shorts = tokens <= kAttentionShort ? 1 : 0;
    plan.tiles = plan.shorts == 1 ? 0 : (tokens + kAttentionRows - 1) / kAttentionRows;
  }
  EMBERT_CUDA(cudaStreamBeginCapture(stream_.handle, cudaStreamCaptureModeThreadLocal));
  const Status status = forward(plan, stream_);
  cudaGraph_t graph = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(stream_.handle, &graph);
  cudaGraphExec_t made = nullptr;
  const bool complete = status.ok() && ended == cudaSuccess;
  const cudaError_t code = complete ? cudaGraphInstantiate(&made, graph, 0) : cudaSuccess;
  if (graph != nullptr) cudaGraphDestroy(graph);
  EMBERT_TRY(status);
  EMBERT_TRY(Status::cuda(ended, "cudaStreamEndCapture"));
  EMBERT_TRY(Status::cuda(code, "cudaGraphInstantiate"));
  slot.graphs[bucket] = made;
  EMBERT_CUDA(cudaGraphUpload(made, stream_.handle));
  return {};
}

Status Encoder::wait(int64_t ticket, float* out) {
  const Slot* const found = find_slot(ticket);
  if (found == nullptr)
    return Status::refused("this ticket is not in flight: it was redeemed, or is not this encoder's");
  Slot& slot = slots_[found - slots_.data()];
  slot.in_flight = false;
  if (!lost_.empty()) return Status::lost("the encoder was lost earlier: " + lost_);
  if (slot.rows == 0) return {};
  EMBERT_TRY(remember(Status::cuda(cudaSetDevice(options_.device), "cudaSetDevice")));
  EMBERT_TRY(remember(
      Status::cuda(cudaEventSynchronize(slot.done), ("forward of " + std::to_string(slot.rows) + " rows").c_str())));
  std::memcpy(out, (slot.direct ? slot.direct_output : slot.output).as(), size_t(slot.rows) * shape_.hidden * 4);
  return {};
}

MemoryUse Encoder::memory_use() const {
  size_t free_now = 0, total = 0;
  cudaMemGetInfo(&free_now, &total);
  size_t activations = arena_.bytes() + gemm_->workspace_bytes();
  for (const Slot& slot : slots_) activations += slot.device_input.bytes() + slot.vectors.bytes();
  return {weights_.bytes(), activations, free_before_ > free_now ? free_before_ - free_now : 0};
}

}  // namespace embert
