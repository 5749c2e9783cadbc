// A batch as the caller passes it, and as the device reads it: header, lengths, cuts, ids and types in one buffer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/status.h"
#include "encoder/encoder_config.h"
#include "heads/tasks.h"

namespace embert {

// A packed batch on the host, as the caller passes it. `submit` reads it before it returns.
struct BatchView {
  int tokens = 0, sequences = 0;
  const int32_t* ids = nullptr;         // [T]
  const int32_t* cu_seqlens = nullptr;  // [B + 1]
  const int32_t* types = nullptr;       // [T] or null: all 0
  // [T] or null: counted from each sequence's start. Used where sequences contain padding tokens: rows of the position
  // table.
  const int32_t* positions = nullptr;
  const Tasks* tasks = nullptr;         // [B], none of them 0, or null: all EMBED
  const int32_t* dimensions = nullptr;  // [B], 0 to width (0: all of them), or null: all of them
  const uint8_t* normalize = nullptr;   // [B] or null: all of them
};

// Layout of that buffer.
struct InputLayout {
  int tokens, sequences;
  size_t lengths, cuts, ids, types, bytes;  // offsets in bytes
  InputLayout(int tokens, int sequences);
};

// Returns an error if the batch exceeds these limits, is inconsistent, or has ids outside of the vocabulary.
Status check_batch(const BatchView& batch, const EncoderConfig& model, int max_tokens, int max_sequences);
void write_batch(const BatchView& batch, const InputLayout& layout, uint8_t* to);

}  // namespace embert
