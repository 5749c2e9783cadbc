#include "encoder/result.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace embert {
namespace {

constexpr Task kTasks[] = {Task::kEmbed, Task::kTokens, Task::kClassify, Task::kSparse, Task::kMulti, Task::kLabelMass};
constexpr size_t kAligned = 64;  // floats: parts are aligned to cache lines

bool requests(const BatchView& batch, int sequence, Task task) {
  return batch.tasks == nullptr ? task == Task::kEmbed : (batch.tasks[sequence] & bit(task)) != 0;
}

int columns_of(Task task, const EncoderConfig& model) {
  switch (task) {
    case Task::kEmbed:
      return model.width();
    case Task::kTokens:
      return model.hidden;
    case Task::kClassify:
      return model.task_heads.labels();
    case Task::kSparse:
      return model.task_heads.splade ? 0 : 1;
    case Task::kLabelMass:
      return 1;
    default:
      return model.task_heads.multi_columns();
  }
}

// A new array with the first `kept` elements of an array, and space for `added` more.
template <typename Array, typename T>
void extend(Array& array, size_t kept, const T* more, size_t added) {
  Array longer(new T[std::max<size_t>(kept + added, 1)]);
  if (kept > 0) std::memcpy(longer.get(), array.get(), kept * sizeof(T));
  if (added > 0) std::memcpy(longer.get() + kept, more, added * sizeof(T));
  array = std::move(longer);
}

}  // namespace

Status append_pairs(const SpladePairs& from, int sequences, int first, Result& result) {
  if (result.offsets == nullptr) result.offsets.reset(new int32_t[result.sequences + 1]());
  int64_t added = 0;
  for (int i = 0; i < sequences; ++i) {
    added += from.counts()[i];
    if (result.rows + added > INT32_MAX) return Status::refused("a batch of over 2147483647 pairs");
    result.offsets[first + i + 1] = int32_t(result.rows + added);
  }
  extend(result.values, result.rows, from.values(), added);
  extend(result.indices, result.rows, from.indices(), added);
  result.rows += int(added);
  return {};
}

void TaskOutputs::place(Task task, int columns) {
  TaskOutput& output = task_output(task);
  output.columns = columns;
  output.first = (floats_ + kAligned - 1) / kAligned * kAligned;
  if (output.rows > 0) floats_ = output.first + size_t(output.rows) * columns;
}

TaskOutputs::TaskOutputs(const BatchView& batch, const EncoderConfig& model)
    : by_sequence_(model.task_heads.by_sequence()),
      scored_(4 * size_t(batch.scored.documents) + size_t(batch.scored.vectors)) {
  if (batch.tasks == nullptr) requested_ = bit(Task::kEmbed);
  for (int i = 0; batch.tasks != nullptr && i < batch.sequences; ++i) requested_ |= batch.tasks[i];
  for (const Task task : kTasks) {
    TaskOutput& output = task_output(task);
    for (int i = 0; requests(bit(task)) && i < batch.sequences; ++i) {
      if (!embert::requests(batch, i, task)) continue;
      ++output.sequences;
      output.rows += (bit(task) & by_sequence_) != 0 ? 1 : batch.cu_seqlens[i + 1] - batch.cu_seqlens[i];
    }
    output.is_all = output.sequences == batch.sequences;
  }
  for (const Task task : kTasks) {
    const bool scored = task == Task::kClassify && batch.scored.spans != nullptr;
    if (task != Task::kTokens) place(task, scored ? batch.scored.parts() : columns_of(task, model));
  }
  own_floats_ = floats_;
  place(Task::kTokens, columns_of(Task::kTokens, model));
}

TaskOutputs::TaskOutputs(Task task, int sequences, const EncoderConfig& model, float* out) : requested_(bit(task)) {
  TaskOutput& output = task_output(task);
  output.sequences = output.rows = sequences;
  output.is_all = true;
  output.out = out;
  place(task, columns_of(task, model));
}

size_t TaskOutputs::listed() const {
  size_t count = scored_;
  for (const Task task : kTasks) {
    if (requests(bit(task)) && !task_output(task).is_all) count += task_output(task).rows;
  }
  return count;
}

void TaskOutputs::write_lists(const BatchView& batch, int* host, const int* device) {
  int* next = host;
  if (scored_ > 0) {
    const ScoredDocuments& scored = batch.scored;
    task_output(Task::kClassify).spans = device;
    next = std::copy_n(scored.spans, 4 * size_t(scored.documents), next);
    next = std::copy_n(scored.rows, scored.vectors, next);
  }
  for (const Task task : kTasks) {
    if (!requests(bit(task)) || task_output(task).is_all) continue;
    task_output(task).chosen = device + (next - host);
    task_output(task).chosen_on_host = next;
    for (int i = 0; i < batch.sequences; ++i) {
      if (!embert::requests(batch, i, task)) continue;
      if ((bit(task) & by_sequence_) != 0) {
        *next++ = i;
      } else {
        for (int row = batch.cu_seqlens[i]; row < batch.cu_seqlens[i + 1]; ++row) *next++ = row;
      }
    }
  }
}

}  // namespace embert
