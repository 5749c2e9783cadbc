// The encoder's host side before a device that only writes down what it is asked to do. Arguments: pooling (0 cls, 1
// mean, 2 max, 3 last), gemm, graphs (0, 1), task (0 embed, 1 tokens), relative positions (0, 1), weights stored in
// FP32 (0, 1), then the lengths of a batch, or of several with a "/" between them, which are then in flight two at a
// time.

#include <cstring>

#include "recording_device.h"

using namespace embert;

int main(int count, char** arguments) {
  if (count < 7) return 2;
  ModelShape shape = small_model();
  shape.relative = std::atoi(arguments[5]) != 0;
  if (shape.relative) shape.positions = kRelativePositions;
  shape.pooling = Pooling(std::atoi(arguments[1]));
  EncoderOptions options;
  options.max_tokens = 4096;
  options.gemm = arguments[2];
  options.graphs = std::atoi(arguments[3]) != 0;
  const Task task = Task(std::atoi(arguments[4]));
  std::vector<std::vector<int32_t>> batches(1, {0});  // of cu_seqlens
  for (int i = 7; i < count; ++i) {
    if (std::strcmp(arguments[i], "/") == 0)
      batches.push_back({0});
    else
      batches.back().push_back(batches.back().back() + std::atoi(arguments[i]));
  }

  std::unique_ptr<Encoder> encoder;
  check(Encoder::create(shape, options, encoder));
  load(*encoder, Stored(std::atoi(arguments[6])));
  if (shape.relative) load_relative(*encoder);
  std::string refusal;
  telling = true;
  check(encoder->start(refusal));
  tell("started graphs=%d\n", encoder->graph_count());
  std::vector<int64_t> tickets;
  const auto wait = [&] {
    const int64_t ticket = tickets.front();
    tickets.erase(tickets.begin());
    const int rows = encoder->rows_of(ticket);
    std::vector<float> out(size_t(rows) * kHidden);
    check(encoder->wait(ticket, out.data()));
    tell("answered rows=%d\n", rows);
  };
  for (const auto& cu_seqlens : batches) {
    const std::vector<int32_t> ids(std::max(1, cu_seqlens.back()), 5);
    BatchView batch;
    batch.tokens = cu_seqlens.back();
    batch.sequences = int(cu_seqlens.size()) - 1;
    batch.ids = ids.data();
    batch.cu_seqlens = cu_seqlens.data();
    if (tickets.size() == 2) wait();
    int64_t ticket = 0;
    check(encoder->submit(batch, task, ticket));
    tell("submitted ticket=%ld\n", long(ticket));
    tickets.push_back(ticket);
  }
  while (!tickets.empty()) wait();
  telling = false;
}
