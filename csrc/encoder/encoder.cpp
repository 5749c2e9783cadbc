#include "encoder/encoder.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "encoder/forward.h"

namespace embert {
namespace {

std::atomic<int64_t> last_ticket{0};

// A batch that owns its memory.
struct OwnedBatch {
  std::vector<int32_t> ids, types, positions, cu_seqlens{0};
  std::vector<Tasks> tasks;

  BatchView view() const {
    BatchView batch;
    batch.tokens = int(ids.size());
    batch.sequences = int(tasks.size());
    batch.ids = ids.data();
    batch.cu_seqlens = cu_seqlens.data();
    batch.types = types.empty() ? nullptr : types.data();
    batch.positions = positions.empty() ? nullptr : positions.data();
    batch.tasks = tasks.data();
    return batch;
  }
};

// Texts of full length, up to the limit of tokens. Their tokens come from the whole vocabulary: the first batch's rows
// decide whether LayerNorms can be folded.
OwnedBatch full_batch(const EncoderConfig& model, int max_tokens, Tasks tasks) {
  OwnedBatch batch;
  const int length = std::min(model.max_length(), max_tokens), sequences = std::max(1, max_tokens / length);
  batch.ids.resize(size_t(sequences) * length);
  for (size_t i = 0; i < batch.ids.size(); ++i) batch.ids[i] = int32_t(i * model.vocabulary / batch.ids.size());
  for (int i = 1; i <= sequences; ++i) batch.cu_seqlens.push_back(i * length);
  batch.tasks.assign(sequences, tasks);
  return batch;
}

// The batch of a slot without a graph, read back from its memory.
OwnedBatch read_batch(const Slot& slot) {
  OwnedBatch batch;
  const BatchPlan& plan = slot.plan;
  const InputLayout layout(plan.rows, plan.sequences);
  const auto numbers = [&](size_t offset) { return reinterpret_cast<const int32_t*>(slot.input() + offset); };
  const auto assign = [&](std::vector<int32_t>& to, const int32_t* from) { to.assign(from, from + plan.rows); };
  assign(batch.ids, numbers(layout.ids));
  assign(batch.types, numbers(layout.types));
  if (plan.positions != nullptr) assign(batch.positions, plan.positions);
  const int32_t* const lengths = numbers(layout.lengths);
  for (int i = 0; i < plan.sequences; ++i) batch.cu_seqlens.push_back(batch.cu_seqlens.back() + lengths[i]);
  return batch;
}

// Some sequences of a batch, which request only SPARSE.
OwnedBatch select_sequences(const OwnedBatch& batch, const int* sequences, int count) {
  OwnedBatch selected;
  for (int i = 0; i < count; ++i) {
    const int first = batch.cu_seqlens[sequences[i]], end = batch.cu_seqlens[sequences[i] + 1];
    for (const auto field : {&OwnedBatch::ids, &OwnedBatch::types, &OwnedBatch::positions}) {
      const std::vector<int32_t>& from = batch.*field;
      if (!from.empty()) (selected.*field).insert((selected.*field).end(), from.begin() + first, from.begin() + end);
    }
    selected.cu_seqlens.push_back(int32_t(selected.ids.size()));
  }
  selected.tasks.assign(count, bit(Task::kSparse));
  return selected;
}

Status check_decider(const EncoderConfig& model, const EncoderConfig* decider) {
  if ((decider != nullptr) != (model.task_heads.options > 0)) return Status::refused("a decider without its options");
  if (decider == nullptr) return {};
  EMBERT_TRY(decider->check());
  const TaskHeads& heads = decider->task_heads;
  if (model.types == 0 && decider->continues && decider->hidden == model.hidden && decider->dtype == model.dtype &&
      !decider->causal && decider->types == model.task_heads.text_types && heads.token_weights &&
      heads.multi_columns() == model.hidden)
    return {};
  return Status::refused("a decider of ", decider->hidden, " columns and ", decider->types, " types after a model of ",
                         model.hidden, " and ", model.task_heads.text_types,
                         ", after token types, or without a product");
}

constexpr char kDecider[] = "decider.";  // the prefix of its tensors

}  // namespace

Status Encoder::create(const EncoderConfig& model, const EncoderOptions& options, std::unique_ptr<Encoder>& created,
                       const EncoderConfig* decider) {
  EMBERT_TRY(model.check());
  EMBERT_TRY(check_decider(model, decider));
  if (options.max_tokens < 1 || options.max_tokens > kMaxTokens) {
    return Status::refused("max_batch_tokens must be 1 to ", kMaxTokens, ", found ", options.max_tokens);
  }
  std::unique_ptr<Encoder> encoder(new Encoder(model, options, decider));
  EMBERT_TRY(encoder->init());
  created = std::move(encoder);
  return {};
}

Status Encoder::init() {
  cudaDeviceProp properties{};
  EMBERT_CUDA(cudaGetDeviceProperties(&properties, options_.device));
  const int major = properties.major, minor = properties.minor;
  EMBERT_TRY(check_capability(properties.name, major, minor));
  EMBERT_CUDA(cudaSetDevice(options_.device));
  EMBERT_CUDA(cudaFree(nullptr));  // creates the context, before memory is measured
  size_t total = 0;
  EMBERT_CUDA(cudaMemGetInfo(&free_before_, &total));
  Stream& compute = streams_.compute;
  for (cudaStream_t* const stream : {&compute.handle, &streams_.uploads, &streams_.downloads})
    EMBERT_CUDA(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
  Build build;
  EMBERT_TRY(check_build(major, minor, read_build(build, compute), build));
  for (DeviceModel* each : models()) EMBERT_TRY(each->create(options_, major == 9 && minor == 0, build, compute));
  EMBERT_TRY(model_.allocate_activations(options_.max_tokens, decider_.get(), compute));
  const Activations& activations = model_.activations;
  for (Slot& slot : slots_)
    EMBERT_TRY(slot.allocate(model_.config, activations.row_capacity(), activations.sequence_capacity(), compute));
  return {};
}

std::vector<DeviceModel*> Encoder::models() {
  return decider_ == nullptr ? std::vector{&model_} : std::vector{&model_, decider_.get()};
}

// The streams outlive everything that uses them.
Encoder::~Encoder() {
  cudaSetDevice(options_.device);
  for (cudaStream_t stream : streams_.all()) {
    if (stream != nullptr) cudaStreamSynchronize(stream);
  }
}

Encoder::Streams::~Streams() {
  for (cudaStream_t stream : all()) {
    if (stream != nullptr) cudaStreamDestroy(stream);
  }
}

Status Encoder::record_loss(Status status) {
  if (status.is_lost() && lost_.empty()) lost_ = status.message();
  return status;
}

Status Encoder::load(const std::string& name, int layer, const void* host, const TensorShape& shape, DType stored) {
  EMBERT_CUDA(cudaSetDevice(options_.device));
  const bool of_decider = decider_ != nullptr && name.rfind(kDecider, 0) == 0;
  Weights& weights = of_decider ? decider_->weights : model_.weights;
  const std::string own_name = of_decider ? name.substr(sizeof(kDecider) - 1) : name;
  return record_loss(weights.load(own_name, layer, host, shape, stored, streams_.compute));
}

Status Encoder::start(std::string& fold_refusal) {
  EMBERT_CUDA(cudaSetDevice(options_.device));
  EMBERT_CUDA(cudaStreamSynchronize(streams_.compute.handle));
  for (DeviceModel* each : models()) {
    EMBERT_TRY(each->weights.complete());
    EMBERT_TRY(each->prepare(streams_.compute));
    if (!each->folds) continue;
    const Status folded = each->provider->check_folds();
    if (folded.is_lost()) return folded;
    fold_refusal = folded.message();
    if (!folded.ok()) return {};
    EMBERT_TRY(each->largest_offset.allocate(sizeof(float)));
    EMBERT_CUDA(cudaMemsetAsync(each->largest_offset.as(), 0, sizeof(float), streams_.compute.handle));
  }
  const EncoderConfig& config = model_.config;
  const Tasks heads = config.task_heads.tasks() & ~bit(Task::kTokens);  // memory for TOKENS is allocated on first use
  EMBERT_TRY(warm_up(decider_ == nullptr ? bit(Task::kEmbed) : heads, 1));
  for (DeviceModel* each : models()) {
    if (each->folds && fold_refusal.empty()) EMBERT_TRY(check_offset(*each, fold_refusal));
  }
  if (!fold_refusal.empty()) return {};
  EMBERT_TRY(warm_up(bit(Task::kEmbed), 1));  // with the kernels that rows under inspection do not use
  if (heads != bit(Task::kEmbed)) EMBERT_TRY(warm_up(heads, int(slots_.size())));
  const std::vector<GraphKey> keys = graph_keys(options_.graphs & config.task_heads.tasks());
  for (Slot& slot : slots_) {
    for (const GraphKey& key : keys) EMBERT_TRY(record_loss(capture(slot, key)));
  }
  return keys.empty() ? Status() : Status::cuda(cudaStreamSynchronize(streams_.compute.handle), "capture of graphs");
}

Status Encoder::warm_up(Tasks tasks, int count) {
  const OwnedBatch batch = full_batch(model_.config, options_.max_tokens, tasks);
  std::vector<int64_t> tickets(count);
  std::vector<Result> results;
  for (int64_t& ticket : tickets) EMBERT_TRY(submit(batch.view(), ticket));
  for (const int64_t ticket : tickets) EMBERT_TRY(wait(ticket, results));
  return {};
}

Status Encoder::check_offset(DeviceModel& model, std::string& fold_refusal) {
  float largest = 0.0f;
  EMBERT_CUDA(cudaMemcpy(&largest, model.largest_offset.as(), sizeof(largest), cudaMemcpyDeviceToHost));
  model.largest_offset.release();
  const std::string refusal = "LayerNorm cannot be folded into the products: a row before it ";
  if (std::isinf(largest)) {
    // With prescaled rows, gamma times a row may exceed the type's range where the row does not. If the model itself
    // exceeds it, it also does without folding, and its requests fail.
    fold_refusal = refusal + "is not finite";
  } else if (largest > kMaxOffset) {
    fold_refusal = refusal + "has a mean of " + std::to_string(largest) + " deviations, at most " +
                   std::to_string(int(kMaxOffset)) + " is taken";
  }
  return {};
}

Status Encoder::capture(Slot& slot, const GraphKey& key) {
  const cudaStream_t stream = streams_.compute.handle;
  EMBERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  const Status status = forward(model_, decider_.get(), slot.plan_graph(key, model_.config), streams_.compute);
  cudaGraph_t graph = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
  cudaGraphExec_t executable = nullptr;
  const bool complete = status.ok() && ended == cudaSuccess;
  const cudaError_t code = complete ? cudaGraphInstantiate(&executable, graph, 0) : cudaSuccess;
  if (graph != nullptr) cudaGraphDestroy(graph);
  EMBERT_TRY(status);
  EMBERT_TRY(Status::cuda(ended, "cudaStreamEndCapture"));
  EMBERT_TRY(Status::cuda(code, "cudaGraphInstantiate"));
  slot.add_graph(key, executable);
  EMBERT_CUDA(cudaGraphUpload(executable, stream));
  return {};
}

Status Encoder::submit(const BatchView& batch, int64_t& ticket) {
  if (!lost_.empty()) return Status::lost("the encoder was lost earlier: " + lost_);
  EMBERT_TRY(check_batch(batch, model_.config, options_.max_tokens, model_.activations.sequence_capacity()));
  EMBERT_TRY(record_loss(Status::cuda(cudaSetDevice(options_.device), "cudaSetDevice")));
  Slot* slot = nullptr;
  for (Slot& candidate : slots_) {
    if (!candidate.in_flight) slot = &candidate;
  }
  if (slot == nullptr) return Status::refused("two batches are in flight already");
  EMBERT_TRY(queue(*slot, batch));
  slot->in_flight = true;
  slot->ticket = ticket = ++last_ticket;
  return {};
}

Status Encoder::queue(Slot& slot, const BatchView& batch) {
  slot.plan = plan_batch(batch, model_.config);
  if (batch.tokens == 0) return {};
  EMBERT_TRY(check_attention_work(slot.plan.tiles, slot.plan.shorts));
  const Status queued = slot.has_graph() ? slot.run_graph(batch, streams_.compute) : run_steps(slot, batch);
  if (queued.ok()) return {};
  // No kernel or copy may read or write the slot any more when this returns.
  if (queued.is_lost()) return record_loss(queued);
  cudaGetLastError();  // otherwise a later launch reports it
  for (const cudaStream_t stream : streams_.all())
    EMBERT_TRY(record_loss(Status::cuda(cudaStreamSynchronize(stream), "after a batch that was refused")));
  return queued;
}

Status Encoder::run_steps(Slot& slot, const BatchView& batch) {
  const Stream& compute = streams_.compute;
  EMBERT_TRY(slot.place(batch, model_.config, model_.activations.token_rows(), compute));
  EMBERT_TRY(slot.upload(batch, streams_.uploads, compute));
  EMBERT_TRY(forward(model_, decider_.get(), slot.plan, compute));
  return slot.download(streams_.downloads, compute);
}

Status Encoder::wait(int64_t ticket, std::vector<Result>& results) {
  results.clear();
  auto* const slot = std::find_if(slots_.begin(), slots_.end(),
                                  [&](const Slot& each) { return each.in_flight && each.ticket == ticket; });
  if (slot == slots_.end())
    return Status::refused("this ticket is not in flight: it was redeemed, or is not this encoder's");
  slot->in_flight = false;
  if (!lost_.empty()) return Status::lost("the encoder was lost earlier: " + lost_);
  if (slot->plan.rows > 0) {
    EMBERT_TRY(record_loss(Status::cuda(cudaSetDevice(options_.device), "cudaSetDevice")));
    EMBERT_TRY(record_loss(slot->synchronize()));
  }
  slot->read_results(*blocks_, results);
  const TaskOutputs& outputs = slot->plan.outputs;
  if (model_.splade == nullptr || !outputs.requests(bit(Task::kSparse))) return {};
  Result pairs{Task::kSparse, outputs.task_output(Task::kSparse).sequences, 0, 1, {}, nullptr, nullptr};
  EMBERT_TRY(collect_pairs(*slot, pairs));  // last: it may reuse the slot's memory
  results.push_back(std::move(pairs));
  return {};
}

Status Encoder::collect_pairs(Slot& slot, Result& result) {
  const SpladePairs& pairs = slot.pairs();
  const int* const requested = slot.plan.outputs.task_output(Task::kSparse).chosen_on_host;
  std::vector<int> sequences, counts(pairs.counts(), pairs.counts() + result.sequences);
  for (int i = 0; i < result.sequences; ++i) sequences.push_back(requested == nullptr ? i : requested[i]);
  int done = pairs.complete(result.sequences);
  EMBERT_TRY(append_pairs(pairs, done, 0, result));
  if (done == result.sequences) return {};
  const OwnedBatch batch = read_batch(slot);
  while (done < result.sequences) {
    int end = done;
    for (int64_t total = 0; end < result.sequences; ++end) {
      total += counts[end];
      if (total > pairs.capacity() && end > done) break;
    }
    const OwnedBatch remaining = select_sequences(batch, sequences.data() + done, end - done);
    EMBERT_TRY(queue(slot, remaining.view()));
    EMBERT_TRY(record_loss(slot.synchronize()));
    const int complete = pairs.complete(end - done);
    EMBERT_TRY(append_pairs(pairs, complete, done, result));
    done += complete;
  }
  return {};
}

MemoryUse Encoder::memory_use() const {
  size_t free_now = 0, total = 0;
  cudaMemGetInfo(&free_now, &total);
  MemoryUse use{model_.weights.bytes(), model_.activations.bytes() + model_.provider->workspace_bytes(),
                free_before_ > free_now ? free_before_ - free_now : 0};
  if (decider_ != nullptr) {
    use.weights += decider_->weights.bytes();
    use.activations += decider_->provider->workspace_bytes();
  }
  for (const Slot& slot : slots_) use.activations += slot.device_bytes();
  if (model_.splade != nullptr) use.activations += model_.splade->workspace_bytes();
  return use;
}

}  // namespace embert
