// The launches of a forward pass that the host decides before it runs. Pure functions of the batch and of the model's
// configuration: they need no device.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "encoder/batch.h"
#include "encoder/encoder_config.h"
#include "encoder/result.h"
#include "heads/heads.h"
#include "heads/splade.h"

namespace embert {

struct BatchPlan {
  int rows = 0, sequences = 0;         // tokens and sequences, or the buckets that they are rounded up to
  int tiles = 0, shorts = 0;           // entries of attention's work lists
  TaskOutputs outputs;                 // the requested tasks and their destinations
  const uint8_t* input = nullptr;      // in InputLayout(rows, sequences)
  const int* positions = nullptr;      // [rows] in host memory, in place of those of offsets.cu
  bool has_prefixes = false;           // sequences continue others
  bool hides_tokens = false;           // sequences have tokens that are not attended to
  const uint8_t* work = nullptr;       // in both cases: attention's lists on the device, in WorkLayout(tiles, shorts)
  const int* cu_seqlens = nullptr;     // in the caller's memory, until `submit` returns; null in a graph
  const SpladePairs* pairs = nullptr;  // destination of pairs
};

// Without the memory of its input and outputs, which the batch's slot adds.
BatchPlan plan_batch(const BatchView& batch, const EncoderConfig& model);

// A captured graph serves batches whose sequences all request one task, by bucket of tokens and of sequences.
using GraphKey = std::tuple<Task, int, int>;

// All graphs for these tasks, in the order of their capture.
std::vector<GraphKey> graph_keys(Tasks tasks);
// The graph that serves a batch, if one does.
std::optional<GraphKey> graph_key(const BatchPlan& plan);
BatchPlan plan_graph(const GraphKey& key, const EncoderConfig& model, const uint8_t* input, float* output);

// The row of each sequence, if it is a single one, that all requested heads read: the others need no processing after
// the last attention. Only where that saves more than the launch that copies these rows.
std::optional<Pooling> gathered_row(const BatchPlan& plan, const EncoderConfig& model);

}  // namespace embert
