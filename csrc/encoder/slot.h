// The memory and the events of one batch in flight.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "common/launch.h"
#include "common/memory.h"
#include "encoder/batch.h"
#include "encoder/plan.h"
#include "encoder/result.h"
#include "heads/splade.h"

namespace embert {

class Slot {
 public:
  Slot() = default;
  Slot(const Slot&) = delete;
  Slot& operator=(const Slot&) = delete;
  ~Slot();

  Status allocate(const EncoderConfig& model, int rows, int sequences, const Stream& stream);
  size_t device_bytes() const {
    return device_input_.bytes() + device_lists_.bytes() + device_work_.bytes() + vectors_.bytes();
  }

  // Captured graphs read the slot's host input and write its direct output.
  BatchPlan plan_graph(const GraphKey& key, const EncoderConfig& model) const {
    return embert::plan_graph(key, model, input_.as(), direct_output_.as<float>());
  }
  int graph_count() const { return int(graphs_.size()); }
  void add_graph(const GraphKey& key, cudaGraphExec_t graph) { graphs_[key] = graph; }
  // True if a graph serves the batch of `plan`; run_graph runs it.
  bool has_graph() const {
    const std::optional<GraphKey> key = graph_key(plan);
    return key && graphs_.count(*key) > 0;
  }
  Status run_graph(const BatchView& batch, const Stream& stream);

  // The steps of a batch without a graph, around its forward pass. `place` reserves memory for its results, and sets
  // the plan's input and destinations.
  Status place(const BatchView& batch, const EncoderConfig& model, float* token_rows, const Stream& stream);
  Status upload(const BatchView& batch, cudaStream_t uploads, const Stream& stream);
  Status download(cudaStream_t downloads, const Stream& stream);

  // Waits for the batch.
  Status synchronize() const;
  // A result for each requested task but SPLADE's pairs.
  void read_results(HostBlocks& blocks, std::vector<Result>& results) const;
  const SpladePairs& pairs() const { return pairs_; }
  const uint8_t* input() const { return input_.as(); }  // in InputLayout(plan.rows, plan.sequences) without a graph

  bool in_flight = false;
  int64_t ticket = 0;
  BatchPlan plan;  // of the batch in flight, or of the last one

 private:
  // Memory for floats of results on the device and in total, and for indices in lists.
  Status reserve(size_t own_floats, size_t floats, size_t listed, const Stream& stream);

  HostBuffer input_, positions_;
  HostBuffer direct_output_;  // heads write it; its address never changes
  HostBuffer output_;         // results are copied into it
  HostBuffer lists_;          // the lists of `chosen` of all tasks
  HostBuffer work_;           // attention's, where the host writes it
  DeviceBuffer device_input_, device_lists_, device_work_;
  DeviceBuffer vectors_;  // results except TOKENS and pairs
  SpladePairs pairs_;
  cudaEvent_t copied_ = nullptr, computed_ = nullptr, done_ = nullptr;
  std::map<GraphKey, cudaGraphExec_t> graphs_;
  bool direct_ = false;  // the results are in direct_output_
};

}  // namespace embert
