// Prints the plan of a batch: rows sequences tiles shorts, the gathered row (Pooling; -1: all rows go on), then task,
// tokens and sequences of its graph, or -1. Arguments: pooling, then a length and bits of tasks for each sequence.
#include <cstdio>
#include <cstdlib>

#include "encoder/plan.h"

using namespace embert;

int main(int count, char** arguments) {
  EncoderConfig model;
  model.hidden = 256;
  model.heads = 4;
  model.layers = 1;
  model.positions = 512;
  model.pooling = Pooling(std::atoi(arguments[1]));
  model.task_heads.classifier = {{256, 3}};
  model.task_heads.multi = {{256, 128}};
  model.task_heads.token_weights = model.task_heads.label_mass = true;
  std::vector<int32_t> cu_seqlens{0};
  std::vector<Tasks> tasks;
  for (int i = 2; i + 1 < count; i += 2) {
    cu_seqlens.push_back(cu_seqlens.back() + std::atoi(arguments[i]));
    tasks.push_back(Tasks(std::atoi(arguments[i + 1])));
  }
  BatchView batch;
  batch.tokens = cu_seqlens.back();
  batch.sequences = int(tasks.size());
  batch.cu_seqlens = cu_seqlens.data();
  batch.tasks = tasks.data();
  const BatchPlan plan = plan_batch(batch, model);
  const std::optional<Pooling> row = gathered_row(plan, model);
  const std::optional<GraphKey> key = graph_key(plan);
  std::printf("%d %d %d %d %d", plan.rows, plan.sequences, plan.tiles, plan.shorts, row ? int(*row) : -1);
  if (key)
    std::printf(" %d %d %d\n", int(std::get<0>(*key)), std::get<1>(*key), std::get<2>(*key));
  else
    std::printf(" -1\n");
}
