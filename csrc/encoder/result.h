// The tasks that a batch's sequences request, and their results.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/memory.h"
#include "encoder/batch.h"
#include "encoder/encoder_config.h"
#include "heads/splade.h"
#include "heads/tasks.h"

namespace embert {

// The result of a task, for the sequences that request it, in the order of the batch.
struct Result {
  Task task = Task::kEmbed;
  int sequences = 0, rows = 0, columns = 0;
  HostBlocks::Floats values;  // [rows, columns]
  // Both null where the lengths of the sequences determine the rows. Otherwise, for rows whose number depends on the
  // forward pass (pairs of index and value): the offset of each sequence's rows, and the index of each row.
  std::unique_ptr<int32_t[]> offsets;  // [sequences + 1]
  std::unique_ptr<int32_t[]> indices;  // [rows]
};

// Adds the pairs of this number of sequences, from `first` on, to a result of pairs. Returns an error if there are
// more pairs than offsets can count.
Status append_pairs(const SpladePairs& from, int sequences, int first, Result& result);

// A task's part of a batch.
struct TaskOutput {
  int sequences = 0;            // that request it
  int rows = 0, columns = 0;    // of the result
  size_t first = 0;             // offset in the results' memory, in floats; pairs have no memory there: 0 columns
  bool is_all = false;          // every sequence requests it
  float* out = nullptr;         // device or mapped host memory
  const int* chosen = nullptr;  // device memory: the requested sequences or their tokens; null: all
  const int* chosen_on_host = nullptr;  // the same
  const int* spans = nullptr;           // device memory: ScoredDocuments' spans, and after them its rows; null: none
};

// All parts of a batch. Memory order: first those that the heads write directly to a batch's own memory, then TOKENS,
// which pass through the memory of the wide activations.
class TaskOutputs {
 public:
  TaskOutputs() = default;
  TaskOutputs(const BatchView& batch, const EncoderConfig& model);
  // One task, requested by all sequences.
  TaskOutputs(Task task, int sequences, const EncoderConfig& model, float* out);

  Tasks requested() const { return requested_; }
  bool requests(Tasks any_of) const { return (requested_ & any_of) != 0; }
  TaskOutput& task_output(Task task) { return outputs_[int(task)]; }
  const TaskOutput& task_output(Task task) const { return outputs_[int(task)]; }

  size_t own_floats() const { return own_floats_; }  // without TOKENS
  size_t floats() const { return floats_; }

  // For tasks that only some sequences request: the indices of these sequences, or of their tokens. Documents that are
  // scored have lists, too.
  size_t listed() const;  // the number of indices
  // Writes them to host memory that will be copied to `device`, and points `chosen` to that.
  void write_lists(const BatchView& batch, int* host, const int* device);

 private:
  void place(Task task, int columns);

  Tasks requested_ = 0;
  Tasks by_sequence_ = kRowTasks;  // whose lists are of sequences
  std::array<TaskOutput, kTaskCount> outputs_{};
  size_t own_floats_ = 0, floats_ = 0;
  size_t scored_ = 0;  // indices in the lists of scored documents
};

}  // namespace embert
