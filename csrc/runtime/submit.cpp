// The way of a batch: `submit` queues it, `wait` returns its vectors.

#include <algorithm>
#include <atomic>
#include <cstring>

#include "elementwise/elementwise.h"
#include "runtime/encoder.h"
#include "runtime/limits.h"

namespace embert {
namespace {

std::atomic<int64_t> last_ticket{0};

}  // namespace

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
  cudaGetLastError();  // else a later launch reports it
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
    // A graph computes its positions itself (offsets.cu).
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
    // The hidden states pass through the memory of the wide activations. The next forward uses it too, so the copy is
    // on this stream.
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

}  // namespace embert
