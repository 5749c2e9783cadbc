// Device memory for the activations of one forward pass. Batches run one after another and share it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "common/memory.h"
#include "encoder/encoder_config.h"
#include "encoder/program.h"
#include "ops/embedding.h"
#include "ops/experts.h"
#include "ops/quantize.h"

namespace embert {

class Activations {
 public:
  // Rows between the first and the last op have at least `widest` columns.
  Status allocate(const EncoderConfig& model, const Program& program, int max_tokens, bool folds, int widest,
                  const Stream& stream);
  // The same memory, for a program that continues with the rows of kX, and has no wider rows.
  Activations of(const Program& program) const;

  int row_capacity() const { return row_capacity_; }
  int sequence_capacity() const { return sequences_; }
  uint8_t* rows(Buffer buffer) const { return rows_[int(buffer)]; }
  float2* stats(Buffer buffer) const { return buffer == Buffer::kX ? x_stats_ : sum_stats_; }
  // The memory of the wide activations is free after the last layer. Its halves hold the rows between a head's layers.
  float* head_rows(int half) const { return reinterpret_cast<float*>(shared_) + half * head_floats_; }
  size_t head_floats() const { return head_floats_; }  // of a half
  uint8_t* multi_rows(int half) const { return shared_ + half * multi_bytes_; }
  // TOKENS pass through it, too.
  float* token_rows() const { return reinterpret_cast<float*>(shared_); }
  const int* zeros() const { return zeros_; }                    // [rows]; null: the model has a table of positions
  const QuantizedRows& quantized() const { return quantized_; }  // [rows, the widest rows that GEMMs read]; with int8
  const RoutedRows& routed() const { return routed_; }
  const OffsetsOutput& offsets() const { return offsets_; }
  size_t bytes() const { return arena_->bytes(); }

 private:
  std::shared_ptr<DeviceBuffer> arena_ = std::make_shared<DeviceBuffer>();
  std::array<uint8_t*, kBuffers> rows_{};
  uint8_t* shared_ = nullptr;  // [rows, program.widest], or the heads' maximum: of which most buffers are parts
  int* zeros_ = nullptr;
  float2 *x_stats_ = nullptr, *sum_stats_ = nullptr;
  QuantizedRows quantized_;
  RoutedRows routed_;
  OffsetsOutput offsets_{};
  int row_capacity_ = 0, sequences_ = 0;
  size_t column_bytes_ = 0, head_floats_ = 0, multi_bytes_ = 0;  // of all rows; the latter two of a half
};

}  // namespace embert
