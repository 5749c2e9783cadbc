// What sequences of a batch want, and what they are answered.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/host_blocks.h"
#include "encoder/batch.h"
#include "encoder/encoder_config.h"
#include "heads/splade/splade.h"
#include "heads/tasks.h"

namespace embert {

// The answer to a task, for the sequences that wanted it, in the order of the batch.
struct Answer {
  Task task = Task::kEmbed;
  int sequences = 0, rows = 0, columns = 0;
  HostBlocks::Floats values;  // [rows, columns]
  // Both null where the lengths of the sequences say which rows are whose. Else, for rows whose number a forward
  // decides (pairs of index and value): where each sequence's begin, and what each row's index is.
  std::unique_ptr<int32_t[]> offsets;  // [sequences + 1]
  std::unique_ptr<int32_t[]> indices;  // [rows]
};

// Adds the pairs of so many sequences, those from `first` on, to an answer of pairs. Refused where there are more pairs
// than offsets can count.
Status append_pairs(const SpladeAnswer& from, int sequences, int first, Answer& answer);

// A task's part of a batch.
struct TaskOutput {
  int sequences = 0;                    // that want it
  int rows = 0, columns = 0;            // of the answer
  size_t first = 0;                     // its place in the answers' memory, in floats; pairs have none there: 0 columns
  bool is_all = false;                  // every sequence wants it
  float* out = nullptr;                 // device or mapped host memory
  const int* chosen = nullptr;          // device memory: the sequences, or their tokens, that are wanted; null: all
  const int* chosen_on_host = nullptr;  // the same
};

// All parts of a batch. Their places: first those that the heads write straight to a batch's own memory, then TOKENS,
// which pass through the memory of the wide activations.
class TaskOutputs {
 public:
  TaskOutputs() = default;
  TaskOutputs(const BatchView& batch, const EncoderConfig& model);
  // One task, which all sequences want.
  TaskOutputs(Task task, int sequences, const EncoderConfig& model, float* out);

  Tasks wanted() const { return wanted_; }
  bool wants(Tasks any_of) const { return (wanted_ & any_of) != 0; }
  TaskOutput& of(Task task) { return parts_[int(task)]; }
  const TaskOutput& of(Task task) const { return parts_[int(task)]; }

  size_t own_floats() const { return own_floats_; }  // without TOKENS
  size_t floats() const { return floats_; }

  // For the tasks that only some sequences want: the numbers of these sequences, or of their tokens.
  size_t listed() const;  // how many numbers
  // Writes them to host memory that will be copied to `device`, and points `chosen` there.
  void write_lists(const BatchView& batch, int* host, const int* device);

 private:
  void place(Task task, int columns);

  Tasks wanted_ = 0;
  Tasks by_sequence_ = kRowTasks;  // whose lists are of sequences
  std::array<TaskOutput, kTaskCount> parts_{};
  size_t own_floats_ = 0, floats_ = 0;
};

}  // namespace embert
