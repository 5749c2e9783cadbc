#include "encoder/slot.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace embert {

Status Slot::allocate(const EncoderConfig& model, int rows, int sequences, const Stream& stream) {
  // Each part of a result is aligned to a cache line.
  const size_t columns = std::max(model.width(), model.task_heads.labels());
  const size_t mass = model.task_heads.label_mass ? 2 : 0;
  const size_t all = model.width() + model.task_heads.labels() + 1 + mass;
  const InputLayout input(rows, sequences);
  EMBERT_TRY(input_.allocate(input.bytes));
  if (model.padding || model.shares_prefixes()) EMBERT_TRY(positions_.allocate(size_t(rows) * 4));
  EMBERT_TRY(device_input_.allocate(input.bytes));
  EMBERT_TRY(direct_output_.allocate(kDirectSequences * all * 4));
  const size_t floats = size_t(std::max(rows / 16, kDirectSequences)) * columns;
  EMBERT_TRY(reserve(floats, floats, 0, stream));
  if (model.task_heads.splade) EMBERT_TRY(pairs_.allocate(model.vocabulary, sequences));
  for (cudaEvent_t* event : {&copied_, &computed_, &done_}) {
    EMBERT_CUDA(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
  }
  return {};
}

Slot::~Slot() {
  for (const auto& [key, graph] : graphs_) cudaGraphExecDestroy(graph);
  for (cudaEvent_t event : {copied_, computed_, done_}) {
    if (event != nullptr) cudaEventDestroy(event);
  }
}

namespace {

// Memory for at least `count` floats or ints.
template <typename Buffer>
Status grow(Buffer& buffer, size_t count) {
  static_assert(sizeof(float) == 4 && sizeof(int) == 4, "either is a count");
  return buffer.bytes() < count * 4 ? buffer.allocate(count * 4) : Status();
}

}  // namespace

Status Slot::reserve(size_t own_floats, size_t floats, size_t listed, const Stream& stream) {
  EMBERT_TRY(grow(output_, floats));
  if (vectors_.bytes() < own_floats * 4) {
    EMBERT_TRY(vectors_.allocate(own_floats * 4));
    // Outputs are aligned to cache lines, and the gaps between them are copied, too.
    EMBERT_CUDA(cudaMemsetAsync(vectors_.as(), 0, vectors_.bytes(), stream.handle));
  }
  EMBERT_TRY(grow(lists_, listed));
  return grow(device_lists_, listed);
}

Status Slot::run_graph(const BatchView& batch, const Stream& stream) {
  const GraphKey key = *graph_key(plan);
  direct_ = true;
  write_batch(batch, InputLayout(std::get<1>(key), std::get<2>(key)), input_.as());
  EMBERT_CUDA(cudaGraphLaunch(graphs_.at(key), stream.handle));
  EMBERT_CUDA(cudaEventRecord(done_, stream.handle));
  return {};
}

Status Slot::place(const BatchView& batch, const EncoderConfig& model, float* token_rows, const Stream& stream) {
  TaskOutputs& outputs = plan.outputs;
  direct_ = !outputs.requests(Tasks(~model.task_heads.by_sequence())) && batch.sequences <= kDirectSequences &&
            batch.scored.spans == nullptr;
  EMBERT_TRY(direct_ ? reserve(0, 0, outputs.listed(), stream)
                     : reserve(outputs.own_floats(), outputs.floats(), outputs.listed(), stream));
  float* const memory = direct_ ? direct_output_.as<float>() : vectors_.as<float>();
  for (int i = 0; i < kTaskCount; ++i) outputs.task_output(Task(i)).out = memory + outputs.task_output(Task(i)).first;
  outputs.task_output(Task::kTokens).out = token_rows;
  outputs.write_lists(batch, lists_.as<int>(), device_lists_.as<int>());
  plan.input = device_input_.as();
  plan.pairs = &pairs_;
  if (batch.positions != nullptr) {
    std::memcpy(positions_.as(), batch.positions, 4 * size_t(batch.tokens));
    plan.positions = positions_.as<int>();
  }
  if (!plan.has_prefixes && !plan.hides_tokens) return {};
  const WorkLayout work(plan.tiles, plan.shorts);
  EMBERT_TRY(grow(work_, work.bytes / 4));
  EMBERT_TRY(grow(device_work_, work.bytes / 4));
  write_work(batch, work, work_.as());
  plan.work = device_work_.as();
  if (!plan.has_prefixes) return {};
  write_prefix_positions(batch, positions_.as<int>());
  plan.positions = positions_.as<int>();
  return {};
}

Status Slot::upload(const BatchView& batch, cudaStream_t uploads, const Stream& stream) {
  const InputLayout layout(batch.tokens, batch.sequences);
  write_batch(batch, layout, input_.as());
  EMBERT_CUDA(cudaMemcpyAsync(device_input_.as(), input_.as(), layout.bytes, cudaMemcpyHostToDevice, uploads));
  if (const size_t bytes = plan.outputs.listed() * sizeof(int); bytes > 0)
    EMBERT_CUDA(cudaMemcpyAsync(device_lists_.as(), lists_.as(), bytes, cudaMemcpyHostToDevice, uploads));
  if (plan.work != nullptr) {
    const size_t bytes = WorkLayout(plan.tiles, plan.shorts).bytes;
    EMBERT_CUDA(cudaMemcpyAsync(device_work_.as(), work_.as(), bytes, cudaMemcpyHostToDevice, uploads));
  }
  EMBERT_CUDA(cudaEventRecord(copied_, uploads));
  EMBERT_CUDA(cudaStreamWaitEvent(stream.handle, copied_));
  return {};
}

Status Slot::download(cudaStream_t downloads, const Stream& stream) {
  const TaskOutputs& outputs = plan.outputs;
  const size_t own_bytes = outputs.own_floats() * sizeof(float);
  float* const host = output_.as<float>();
  cudaStream_t last = stream.handle;
  const TaskOutput& tokens = outputs.task_output(Task::kTokens);
  if (!direct_ && tokens.rows > 0) {
    // The next forward pass uses this memory too, so the copy is on its stream.
    EMBERT_CUDA(cudaMemcpyAsync(host + tokens.first, tokens.out, size_t(tokens.rows) * tokens.columns * sizeof(float),
                                cudaMemcpyDeviceToHost, last));
  }
  if (!direct_ && own_bytes > 0) {
    EMBERT_CUDA(cudaEventRecord(computed_, stream.handle));
    EMBERT_CUDA(cudaStreamWaitEvent(downloads, computed_));
    last = downloads;
    EMBERT_CUDA(cudaMemcpyAsync(host, vectors_.as(), own_bytes, cudaMemcpyDeviceToHost, last));
  }
  EMBERT_CUDA(cudaEventRecord(done_, last));
  return {};
}

Status Slot::synchronize() const {
  const std::string work = "forward of " + std::to_string(plan.rows) + " tokens";
  return Status::cuda(cudaEventSynchronize(done_), work.c_str());
}

void Slot::read_results(HostBlocks& blocks, std::vector<Result>& results) const {
  const float* const host = (direct_ ? direct_output_ : output_).as<float>();
  for (int i = 0; i < kTaskCount; ++i) {
    const TaskOutput& output = plan.outputs.task_output(Task(i));
    const size_t count = size_t(output.rows) * output.columns;
    if (!plan.outputs.requests(bit(Task(i))) || output.columns == 0) continue;
    Result result{Task(i), output.sequences, output.rows, output.columns, blocks.allocate(count), nullptr, nullptr};
    if (count > 0) std::memcpy(result.values.get(), host + output.first, count * sizeof(float));
    results.push_back(std::move(result));
  }
}

}  // namespace embert
