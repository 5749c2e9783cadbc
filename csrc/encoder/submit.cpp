// `submit` queues a batch, `wait` returns its answers.

#include <algorithm>
#include <atomic>
#include <cstring>

#include "encoder/batch.h"
#include "encoder/encoder.h"

namespace embert {
namespace {

std::atomic<int64_t> last_ticket{0};

}  // namespace

Status Encoder::reserve(Slot& slot, size_t own_floats, size_t floats, size_t listed) {
  const auto grow = [](auto& buffer, size_t count) -> Status {
    static_assert(sizeof(float) == 4 && sizeof(int) == 4, "either is a count");
    return buffer.bytes() < count * 4 ? buffer.allocate(count * 4) : Status();
  };
  EMBERT_TRY(grow(slot.output, floats));
  if (slot.vectors.bytes() < own_floats * 4) {
    EMBERT_TRY(slot.vectors.allocate(own_floats * 4));
    // Outputs are aligned to cache lines, and the gaps between them are copied, too.
    EMBERT_CUDA(cudaMemsetAsync(slot.vectors.as(), 0, slot.vectors.bytes(), stream_.handle));
  }
  EMBERT_TRY(grow(slot.lists, listed));
  return grow(slot.device_lists, listed);
}

const Encoder::Slot* Encoder::find_slot(int64_t ticket) const {
  for (const Slot& slot : slots_) {
    if (slot.in_flight && slot.ticket == ticket) return &slot;
  }
  return nullptr;
}

Status Encoder::drain(Status failed) {
  if (failed.is_lost()) return record_loss(failed);
  cudaGetLastError();  // otherwise a later launch reports it
  for (const cudaStream_t stream : {uploads_, stream_.handle, downloads_}) {
    const Status drained = record_loss(Status::cuda(cudaStreamSynchronize(stream), "after a batch that was refused"));
    if (!drained.ok()) return drained;
  }
  return failed;
}

Status Encoder::submit(const BatchView& batch, int64_t& ticket) {
  if (!lost_.empty()) return Status::lost("the encoder was lost earlier: " + lost_);
  EMBERT_TRY(check_batch(batch, model_, options_.max_tokens, sequence_capacity_));
  EMBERT_TRY(record_loss(Status::cuda(cudaSetDevice(options_.device), "cudaSetDevice")));
  Slot* slot = nullptr;
  for (Slot& candidate : slots_) {
    if (!candidate.in_flight) slot = &candidate;
  }
  if (slot == nullptr) return Status::refused("two batches are in flight already");
  slot->tokens = batch.tokens;
  slot->sequences = batch.sequences;
  slot->has_positions = batch.positions != nullptr;
  slot->outputs = TaskOutputs(batch, model_);
  if (batch.tokens > 0) {
    GraphKey key;
    const bool small = key_of(batch, slot->outputs.requested(), key) && slot->graphs.count(key) > 0;
    Plan plan{};
    if (!small) EMBERT_TRY(plan_large(*slot, batch, plan));
    const Status queued = small ? submit_small(*slot, batch, key) : submit_large(*slot, batch, plan);
    if (!queued.ok()) return drain(queued);
  }
  slot->in_flight = true;
  slot->ticket = ticket = ++last_ticket;
  return {};
}

Status Encoder::submit_small(Slot& slot, const BatchView& batch, const GraphKey& key) {
  write_batch(batch, InputLayout(std::get<1>(key), std::get<2>(key)), slot.input.as());
  slot.direct = true;
  EMBERT_CUDA(cudaGraphLaunch(slot.graphs.at(key), stream_.handle));
  EMBERT_CUDA(cudaEventRecord(slot.done, stream_.handle));
  return {};
}

Status Encoder::plan_large(Slot& slot, const BatchView& batch, Plan& plan) {
  plan = {batch.tokens, batch.sequences, 0, 0, 0, slot.device_input.as(), {}};
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
  TaskOutputs& outputs = slot.outputs;
  const size_t listed = outputs.listed();
  slot.direct = !outputs.requests(Tasks(~model_.task_heads.by_sequence())) && batch.sequences <= kDirectSequences;
  const Status reserved =
      slot.direct ? reserve(slot, 0, 0, listed) : reserve(slot, outputs.own_floats(), outputs.floats(), listed);
  if (!reserved.ok()) return drain(reserved);
  float* const memory = (slot.direct ? slot.direct_output.as<float>() : slot.vectors.as<float>());
  for (int i = 0; i < kTaskCount; ++i) outputs.task_output(Task(i)).out = memory + outputs.task_output(Task(i)).first;
  // TOKENS pass through the memory of the wide activations.
  outputs.task_output(Task::kTokens).out = reinterpret_cast<float*>(buffers_.shared);
  outputs.write_lists(batch, slot.lists.as<int>(), slot.device_lists.as<int>());
  plan.outputs = outputs;
  plan.cu_seqlens = batch.cu_seqlens;
  plan.pairs = &slot.pairs;
  if (batch.positions != nullptr) {
    std::memcpy(slot.positions.as(), batch.positions, 4 * size_t(batch.tokens));
    plan.positions = slot.positions.as<int>();
  }
  return {};
}

Status Encoder::submit_large(Slot& slot, const BatchView& batch, const Plan& plan) {
  const InputLayout layout(batch.tokens, batch.sequences);
  write_batch(batch, layout, slot.input.as());
  EMBERT_CUDA(cudaMemcpyAsync(slot.device_input.as(), slot.input.as(), layout.bytes, cudaMemcpyHostToDevice, uploads_));
  if (const size_t bytes = slot.outputs.listed() * sizeof(int); bytes > 0) {
    EMBERT_CUDA(cudaMemcpyAsync(slot.device_lists.as(), slot.lists.as(), bytes, cudaMemcpyHostToDevice, uploads_));
  }
  EMBERT_CUDA(cudaEventRecord(slot.copied, uploads_));
  EMBERT_CUDA(cudaStreamWaitEvent(stream_.handle, slot.copied));
  EMBERT_TRY(forward(plan, stream_));
  return slot.direct ? Status::cuda(cudaEventRecord(slot.done, stream_.handle), "cudaEventRecord") : download(slot);
}

Status Encoder::download(Slot& slot) {
  const TaskOutputs& outputs = slot.outputs;
  float* const host = slot.output.as<float>();
  cudaStream_t last = stream_.handle;
  if (const TaskOutput& output = outputs.task_output(Task::kTokens); output.rows > 0) {
    // The next forward pass uses this memory too, so the copy is on its stream.
    EMBERT_CUDA(cudaMemcpyAsync(host + output.first, output.out, size_t(output.rows) * output.columns * sizeof(float),
                                cudaMemcpyDeviceToHost, last));
  }
  if (outputs.own_floats() > 0) {
    EMBERT_CUDA(cudaEventRecord(slot.computed, stream_.handle));
    EMBERT_CUDA(cudaStreamWaitEvent(downloads_, slot.computed));
    last = downloads_;
    EMBERT_CUDA(
        cudaMemcpyAsync(host, slot.vectors.as(), outputs.own_floats() * sizeof(float), cudaMemcpyDeviceToHost, last));
  }
  EMBERT_CUDA(cudaEventRecord(slot.done, last));
  return {};
}

Status Encoder::wait(int64_t ticket, std::vector<Answer>& answers) {
  answers.clear();
  const Slot* const claimed = find_slot(ticket);
  if (claimed == nullptr)
    return Status::refused("this ticket is not in flight: it was redeemed, or is not this encoder's");
  Slot& slot = slots_[claimed - slots_.data()];
  slot.in_flight = false;
  if (!lost_.empty()) return Status::lost("the encoder was lost earlier: " + lost_);
  if (slot.tokens > 0) {
    EMBERT_TRY(record_loss(Status::cuda(cudaSetDevice(options_.device), "cudaSetDevice")));
    EMBERT_TRY(record_loss(Status::cuda(cudaEventSynchronize(slot.done),
                                        ("forward of " + std::to_string(slot.tokens) + " tokens").c_str())));
  }
  const float* const host = (slot.direct ? slot.direct_output : slot.output).as<float>();
  for (int i = 0; i < kTaskCount; ++i) {
    if (!slot.outputs.requests(bit(Task(i))) || (Task(i) == Task::kSparse && splade_ != nullptr)) continue;
    const TaskOutput& output = slot.outputs.task_output(Task(i));
    const size_t count = size_t(output.rows) * output.columns;
    Answer answer{Task(i), output.sequences, output.rows, output.columns, blocks_->allocate(count), nullptr, nullptr};
    if (count > 0) std::memcpy(answer.values.get(), host + output.first, count * sizeof(float));
    answers.push_back(std::move(answer));
  }
  if (splade_ == nullptr || !slot.outputs.requests(bit(Task::kSparse))) return {};
  Answer pairs{Task::kSparse, slot.outputs.task_output(Task::kSparse).sequences, 0, 1, {}, nullptr, nullptr};
  EMBERT_TRY(collect_pairs(slot, pairs));  // last: it may reuse the slot's memory
  answers.push_back(std::move(pairs));
  return {};
}

Status Encoder::run_again(Slot& slot, const BatchView& batch) {
  slot.tokens = batch.tokens;
  slot.sequences = batch.sequences;
  slot.outputs = TaskOutputs(batch, model_);
  Plan plan{};
  EMBERT_TRY(plan_large(slot, batch, plan));
  const Status queued = submit_large(slot, batch, plan);
  if (!queued.ok()) return drain(queued);
  return record_loss(
      Status::cuda(cudaEventSynchronize(slot.done), ("forward of " + std::to_string(slot.tokens) + " tokens").c_str()));
}

}  // namespace embert
