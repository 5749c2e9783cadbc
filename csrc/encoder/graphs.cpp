// Captured graphs of small batches: which batches they serve, and their capture.

#include <algorithm>

#include "encoder/batch.h"
#include "encoder/encoder.h"

namespace embert {
namespace {

// The smallest bucket that holds `value`; 0 if none does.
template <size_t n>
int round_up(const int (&buckets)[n], int value) {
  const int* const bucket = std::lower_bound(buckets, buckets + n, value);
  return bucket == buckets + n ? 0 : *bucket;
}

}  // namespace

bool Encoder::key_of(const BatchView& batch, Tasks requested, GraphKey& key) {
  if (requested != bit(Task::kEmbed) && requested != bit(Task::kClassify)) return false;
  // A graph computes its positions itself (offsets.cu).
  if (batch.positions != nullptr) return false;
  const int tokens = round_up(kTokenBuckets, batch.tokens), sequences = round_up(kSequenceBuckets, batch.sequences);
  key = {requested == bit(Task::kEmbed) ? Task::kEmbed : Task::kClassify, tokens, sequences};
  return tokens != 0 && sequences != 0;
}

Status Encoder::capture_graphs() {
  const Tasks tasks = options_.graphs & model_.task_heads.tasks();
  for (Slot& slot : slots_) {
    for (const Task task : {Task::kEmbed, Task::kClassify}) {
      for (int tokens : kTokenBuckets) {
        for (int count : kSequenceBuckets) {
          if (count <= tokens && (tasks & bit(task)) != 0)
            EMBERT_TRY(record_loss(capture(slot, {task, tokens, count})));
        }
      }
    }
  }
  EMBERT_CUDA(cudaStreamSynchronize(stream_.handle));
  return {};
}

Status Encoder::capture(Slot& slot, const GraphKey& key) {
  const auto [task, tokens, sequences] = key;
  Plan plan{tokens,
            sequences,
            max_tiles(tokens, sequences),
            sequences,
            std::min(tokens, model_.max_length()),
            slot.input.as(),
            TaskOutputs(task, sequences, model_, slot.direct_output.as<float>()),
            true};
  if (sequences == 1) {  // the bucket determines whether the one sequence is short or long
    plan.shorts = tokens <= kAttentionShort ? 1 : 0;
    plan.tiles = plan.shorts == 1 ? 0 : (tokens + kAttentionRows - 1) / kAttentionRows;
  }
  EMBERT_CUDA(cudaStreamBeginCapture(stream_.handle, cudaStreamCaptureModeThreadLocal));
  const Status status = forward(plan, stream_);
  cudaGraph_t graph = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(stream_.handle, &graph);
  cudaGraphExec_t executable = nullptr;
  const bool complete = status.ok() && ended == cudaSuccess;
  const cudaError_t code = complete ? cudaGraphInstantiate(&executable, graph, 0) : cudaSuccess;
  if (graph != nullptr) cudaGraphDestroy(graph);
  EMBERT_TRY(status);
  EMBERT_TRY(Status::cuda(ended, "cudaStreamEndCapture"));
  EMBERT_TRY(Status::cuda(code, "cudaGraphInstantiate"));
  slot.graphs[key] = executable;
  EMBERT_CUDA(cudaGraphUpload(executable, stream_.handle));
  return {};
}

}  // namespace embert
