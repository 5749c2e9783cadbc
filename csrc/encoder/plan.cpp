#include "encoder/plan.h"

#include <algorithm>

namespace embert {
namespace {

// From this many rows on, the last layer's GEMMs run only on the rows that heads read, where these read one a sequence.
// Below, by count, gathering them costs a launch and saves no more than that.
constexpr int kGatherRows = 128;

constexpr Task kGraphTasks[] = {Task::kEmbed, Task::kClassify};

// The smallest bucket that holds `value`; 0 if none does.
template <size_t n>
int round_up(const int (&buckets)[n], int value) {
  const int* const bucket = std::lower_bound(buckets, buckets + n, value);
  return bucket == buckets + n ? 0 : *bucket;
}

int tiles_of(int length) {
  return (length + kAttentionRows - 1) / kAttentionRows;
}

}  // namespace

BatchPlan plan_batch(const BatchView& batch, const EncoderConfig& model) {
  BatchPlan plan;
  plan.rows = batch.tokens;
  plan.sequences = batch.sequences;
  plan.outputs = TaskOutputs(batch, model);
  plan.positions = batch.positions;
  plan.has_prefixes = batch.prefixes != nullptr;
  plan.hides_tokens = batch.attended != nullptr;
  plan.cu_seqlens = batch.cu_seqlens;
  for (int i = 0; i < batch.sequences; ++i) {
    const int own = batch.own_tokens(i);
    if (own + batch.prefix_tokens(i) <= kAttentionShort) {
      ++plan.shorts;
    } else {
      plan.tiles += tiles_of(own);
    }
  }
  return plan;
}

std::vector<GraphKey> graph_keys(Tasks tasks) {
  std::vector<GraphKey> keys;
  for (const Task task : kGraphTasks) {
    for (const int tokens : kTokenBuckets) {
      for (const int sequences : kSequenceBuckets) {
        if (sequences <= tokens && (tasks & bit(task)) != 0) keys.emplace_back(task, tokens, sequences);
      }
    }
  }
  return keys;
}

std::optional<GraphKey> graph_key(const BatchPlan& plan) {
  // A graph computes positions and work lists itself (offsets.cu).
  if (plan.positions != nullptr || plan.has_prefixes || plan.hides_tokens) return {};
  const int tokens = round_up(kTokenBuckets, plan.rows), sequences = round_up(kSequenceBuckets, plan.sequences);
  for (const Task task : kGraphTasks) {
    if (plan.outputs.requested() == bit(task) && tokens != 0 && sequences != 0)
      return GraphKey(task, tokens, sequences);
  }
  return {};
}

BatchPlan plan_graph(const GraphKey& key, const EncoderConfig& model, const uint8_t* input, float* output) {
  const auto [task, tokens, sequences] = key;
  BatchPlan plan;
  plan.rows = tokens;
  plan.sequences = plan.shorts = sequences;
  plan.tiles = max_tiles(tokens, sequences);
  if (sequences == 1) {  // the bucket determines whether the one sequence is short or long
    plan.shorts = tokens <= kAttentionShort ? 1 : 0;
    plan.tiles = plan.shorts == 1 ? 0 : tiles_of(tokens);
  }
  plan.outputs = TaskOutputs(task, sequences, model, output);
  plan.input = input;
  return plan;
}

std::optional<Pooling> gathered_row(const BatchPlan& plan, const EncoderConfig& model) {
  const TaskOutputs& outputs = plan.outputs;
  const bool classifies = outputs.requests(bit(Task::kClassify));
  const Pooling row = classifies ? model.classifier_pooling : model.pooling;
  if (classifies && model.task_heads.classifier.empty()) return {};  // deciders and scores read all rows
  if (outputs.requests(Tasks(~kRowTasks)) || (row != Pooling::kCls && row != Pooling::kLast)) return {};
  if (classifies && outputs.requests(bit(Task::kEmbed)) && model.pooling != row) return {};
  // With norms after both parts kX keeps the residual, and gathered rows are elsewhere.
  const bool fits = model.gathered_columns() <= 2 * model.qkv_columns(model.layers - 1) && !model.sublayer_norms;
  return fits && plan.rows >= kGatherRows && 2 * plan.sequences <= plan.rows ? std::optional(row) : std::nullopt;
}

}  // namespace embert
