// The encoder's host side before a device that only writes down what it is asked to do. Arguments: pooling (0 cls, 1
// mean, 2 max, 3 last), gemm, graphs (bits of tasks), the model (Kind), how its
// weights are stored (Stored), heads
// of the model (bits of tasks; EMBED: Dense modules; 32: SPLADE; 64: SPLADE with more pairs than there is room for
// beyond two texts'), then the lengths of a batch, or of several with a "/" between them, which are then in flight two
// at a time. A length may be followed by ":" and bits of tasks; without, it wants EMBED.

#include <cstring>

#include "recording_device.h"

using namespace embert;

namespace {

struct Batch {
  std::vector<int32_t> cu_seqlens{0};
  std::vector<Tasks> tasks;
};

TaskHeads heads(int tasks) {
  const auto has = [&](Task task) { return (tasks & bit(task)) != 0; };
  TaskHeads made;
  if (has(Task::kEmbed)) made.dense = {{kHidden, 99, HeadActivation::kRelu}, {99, 64, HeadActivation::kIdentity}};
  if (has(Task::kClassify))
    made.classifier = {{kHidden, kHidden, HeadActivation::kTanh}, {kHidden, 3, HeadActivation::kIdentity}};
  made.token_weights = has(Task::kSparse);
  if (has(Task::kMulti)) made.multi = {{kHidden, 128}};
  if ((tasks & 128) != 0) {
    made.multi = {{kHidden, kHidden, HeadActivation::kGelu}, {kHidden, 128}};
    made.token_logits = made.token_norm = true;
  }
  if ((tasks & 96) != 0) made.splade = SpladeKind{};
  if ((tasks & 64) != 0) pairs_of_text = int(kPairs / 3) + 1;
  return made;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 7) return 2;
  EncoderConfig model = model_of(Kind(std::atoi(arguments[4])));
  model.pooling = Pooling(std::atoi(arguments[1]));
  EncoderOptions options;
  options.max_tokens = 4096;
  options.gemm = arguments[2];
  options.graphs = Tasks(std::atoi(arguments[3]));
  model.task_heads = heads(std::atoi(arguments[6]));
  std::vector<Batch> batches(1);
  for (int i = 7; i < count; ++i) {
    if (std::strcmp(arguments[i], "/") == 0) {
      batches.emplace_back();
      continue;
    }
    const char* const tasks = std::strchr(arguments[i], ':');
    batches.back().cu_seqlens.push_back(batches.back().cu_seqlens.back() + std::atoi(arguments[i]));
    batches.back().tasks.push_back(tasks == nullptr ? bit(Task::kEmbed) : Tasks(std::atoi(tasks + 1)));
  }

  std::unique_ptr<Encoder> encoder;
  check(Encoder::create(model, options, encoder));
  load(*encoder, Stored(std::atoi(arguments[5])));
  load_heads(*encoder);
  if (model.relative) load_relative(*encoder);
  std::string refusal;
  telling = true;
  check(encoder->start(refusal));
  tell("started graphs=%d\n", encoder->graph_count());
  std::vector<int64_t> tickets;
  const auto wait = [&] {
    const int64_t ticket = tickets.front();
    tickets.erase(tickets.begin());
    std::vector<Result> results;
    check(encoder->wait(ticket, results));
    tell("finished");
    for (const Result& result : results)
      tell(" rows%d=%d columns%d=%d", bit(result.task), result.rows, bit(result.task), result.columns);
    tell("\n");
  };
  for (const auto& [cu_seqlens, tasks] : batches) {
    const std::vector<int32_t> ids(std::max(1, cu_seqlens.back()), 5);
    BatchView batch;
    batch.tokens = cu_seqlens.back();
    batch.sequences = int(cu_seqlens.size()) - 1;
    batch.ids = ids.data();
    batch.cu_seqlens = cu_seqlens.data();
    batch.tasks = tasks.data();
    if (tickets.size() == 2) wait();
    int64_t ticket = 0;
    check(encoder->submit(batch, ticket));
    tell("submitted ticket=%ld\n", long(ticket));
    tickets.push_back(ticket);
  }
  while (!tickets.empty()) wait();
  telling = false;
}
