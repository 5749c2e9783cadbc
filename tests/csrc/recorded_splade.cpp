// The encoder with a SPLADE head before a device that only writes down what it is asked to do. Arguments: 1 where there
// is room for no more pairs than two texts have, then the length and the bits of tasks of each text of one batch.

#include "recording_device.h"

using namespace embert;

int main(int count, char** arguments) {
  if (count < 4) return 2;
  EncoderConfig model = model_of(Kind::kBert);
  EncoderOptions options;
  options.max_tokens = 4096;
  options.gemm = "hopper";
  model.task_heads.splade = SpladeKind{};
  if (std::atoi(arguments[1]) != 0) pairs_of_text = int(kPairs / 3) + 1;
  std::vector<int> lengths;
  std::vector<Tasks> tasks;
  for (int i = 2; i + 1 < count; i += 2) {
    lengths.push_back(std::atoi(arguments[i]));
    tasks.push_back(Tasks(std::atoi(arguments[i + 1])));
  }

  std::unique_ptr<Encoder> encoder;
  check(Encoder::create(model, options, encoder));
  load(*encoder);
  std::string refusal;
  check(encoder->start(refusal));
  telling = true;
  Batch batch(lengths);
  batch.view.tasks = tasks.data();
  int64_t ticket = 0;
  check(encoder->submit(batch.view, ticket));
  std::vector<Result> results;
  check(encoder->wait(ticket, results));
  for (const Result& result : results)
    tell("result task=%d rows=%d columns=%d\n", bit(result.task), result.rows, result.columns);
  telling = false;
}
