// The tasks of a forward pass: bits of a mask, the same as in engine/tasks.py. A sequence may request several, and
// sequences with different tasks share a batch.
#pragma once

#include <cstdint>
#include <string>

namespace embert {

enum class Task : int {
  kEmbed = 0,     // a vector a sequence: pooled, through the Dense modules, cut, of length 1
  kTokens = 1,    // a vector a token: the last hidden state
  kClassify = 2,  // logits of the classification head, a row a sequence
  kSparse = 3,    // weights of a sparse vector; token_weights.cu writes one row per token
  kMulti = 4,     // a vector a token: projected, of length 1
};
constexpr int kTaskCount = 5;

using Tasks = uint8_t;  // bits of tasks
constexpr Tasks bit(Task task) {
  return Tasks(1u << int(task));
}

// Tasks that read one row of the last layer per sequence, or pool one: their answers have one row per sequence.
constexpr Tasks kRowTasks = bit(Task::kEmbed) | bit(Task::kClassify);

// For messages: "EMBED, TOKENS".
inline std::string names_of(Tasks tasks) {
  const char* const names[kTaskCount] = {"EMBED", "TOKENS", "CLASSIFY", "SPARSE", "MULTI"};
  std::string all;
  for (int i = 0; i < kTaskCount; ++i) {
    if ((tasks >> i & 1) != 0) all += (all.empty() ? "" : ", ") + std::string(names[i]);
  }
  return all;
}

}  // namespace embert
