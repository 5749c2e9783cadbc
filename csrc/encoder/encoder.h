// A BERT-family encoder on one CUDA device: a model, and slots for the batches in flight. Two may be in flight.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "encoder/batch.h"
#include "encoder/device_model.h"
#include "encoder/plan.h"
#include "encoder/result.h"
#include "encoder/slot.h"

namespace embert {

struct MemoryUse {
  size_t weights, activations, total;  // bytes; total: the decrease of the device's free memory
};

class Encoder {
 public:
  // decider: null, or layers that continue the model's and compute CLASSIFY.
  static Status create(const EncoderConfig& model, const EncoderOptions& options, std::unique_ptr<Encoder>& created,
                       const EncoderConfig* decider = nullptr);
  ~Encoder();
  Encoder(const Encoder&) = delete;
  Encoder& operator=(const Encoder&) = delete;

  // Uploads one tensor; names and shapes as in encoder/weights.h, the decider's after "decider.".
  // Call order: first all tensors, then `start`, then batches.
  Status load(const std::string& name, int layer, const void* host, const TensorShape& shape, DType stored);
  // Prepares the GEMMs, warms up, captures graphs. Where LayerNorms cannot be folded into these weights, `fold_refusal`
  // has the reason, and the encoder is not started: create another one that does not fold.
  Status start(std::string& fold_refusal);

  // Starts a forward pass. Its ticket goes to `wait`, once. Returns an error while two batches are in flight, for an
  // invalid batch, and when memory runs out; such a batch leaves nothing in flight. Tickets are unique in a process, so
  // a ticket that was redeemed, or is another encoder's, is recognized.
  Status submit(const BatchView& batch, int64_t& ticket);
  // A result for each task that some sequence requests. An empty batch without tasks has an EMBED result of no rows.
  Status wait(int64_t ticket, std::vector<Result>& results);

  const EncoderConfig& model() const { return model_.config; }
  const Weights& weights() const { return model_.weights; }
  const char* gemm_name() const { return model_.provider->name(); }
  bool folds() const { return model_.folds; }
  int graph_count() const { return slots_[0].graph_count() + slots_[1].graph_count(); }
  MemoryUse memory_use() const;

 private:
  struct Streams {
    Stream compute;
    cudaStream_t uploads = nullptr, downloads = nullptr;
    std::array<cudaStream_t, 3> all() const { return {uploads, compute.handle, downloads}; }
    ~Streams();
  };

  Encoder(const EncoderConfig& model, const EncoderOptions& options, const EncoderConfig* decider)
      : options_(options), model_(model), decider_(decider == nullptr ? nullptr : new DeviceModel(*decider)) {}
  Status init();
  std::vector<DeviceModel*> models();
  // Runs full batches of these tasks, `count` at once, so that all kernels are loaded before the first request.
  Status warm_up(Tasks tasks, int count);
  Status check_offset(DeviceModel& model, std::string& fold_refusal);
  Status capture(Slot& slot, const GraphKey& key);
  // Queues a batch. On an error nothing of it is in flight any more.
  Status queue(Slot& slot, const BatchView& batch);
  Status run_steps(Slot& slot, const BatchView& batch);
  // The pairs of a completed batch. Sequences whose pairs did not fit run again, as many at a time as fit.
  Status collect_pairs(Slot& slot, Result& result);
  Status record_loss(Status status);

  EncoderOptions options_;
  Streams streams_;
  DeviceModel model_;
  std::unique_ptr<DeviceModel> decider_;  // null: the model has none
  std::array<Slot, 2> slots_;
  std::shared_ptr<HostBlocks> blocks_ = std::make_shared<HostBlocks>();  // of results
  size_t free_before_ = 0;
  std::string lost_;  // why the encoder can no longer be used
};

}  // namespace embert
