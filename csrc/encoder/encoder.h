// A BERT-family encoder on one CUDA device: weights, activations, staging memory, graphs. Two batches may be in flight.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "common/capability.h"
#include "common/launch.h"
#include "common/memory.h"
#include "common/tensor_maps.h"
#include "encoder/answer.h"
#include "encoder/batch.h"
#include "encoder/encoder_config.h"
#include "encoder/program.h"
#include "encoder/weights.h"
#include "gemm/gemm.h"
#include "heads/splade.h"
#include "ops/embedding.h"

namespace embert {

struct EncoderOptions {
  int device = 0;
  int max_tokens = 16384;
  std::string gemm = "auto";     // "auto", "hopper", "cublaslt"
  std::string cublaslt_library;  // file name or path; empty: the loader's own search
  bool fold = true;              // fold LayerNorms into the GEMMs, where the provider supports it
  // Tasks whose small batches are captured at start: EMBED, CLASSIFY or both; CLASSIFY is skipped where the model has
  // no classifier.
  Tasks graphs = bit(Task::kEmbed);
};

struct MemoryUse {
  size_t weights, activations, total;  // bytes; total: the decrease of the device's free memory
};

class Encoder {
 public:
  static Status create(const EncoderConfig& model, const EncoderOptions& options, std::unique_ptr<Encoder>& created);
  ~Encoder();
  Encoder(const Encoder&) = delete;
  Encoder& operator=(const Encoder&) = delete;

  // Uploads one tensor; names and shapes as in encoder/weights.h, and after "splade." as in heads/splade.h.
  // Call order: first all tensors, then `start`, then batches.
  Status load(const std::string& name, int layer, const void* host, const TensorShape& shape, DType stored);
  // Prepares the GEMMs, warms up, captures graphs. Where LayerNorms cannot be folded into these weights, `fold_refusal`
  // has the reason, and the encoder is not started: create another one that does not fold.
  Status start(std::string& fold_refusal);

  // Starts a forward pass. Its ticket goes to `wait`, once. Returns an error while two batches are in flight, for an
  // invalid batch, and when memory runs out; such a batch leaves nothing in flight. Tickets are unique in a process, so
  // a ticket that was redeemed, or is another encoder's, is recognized.
  Status submit(const BatchView& batch, int64_t& ticket);
  // An answer for each task that some sequence requests. An empty batch without tasks has an EMBED answer of no rows.
  Status wait(int64_t ticket, std::vector<Answer>& answers);

  const EncoderConfig& model() const { return model_; }
  const char* gemm_name() const { return gemm_->name(); }
  bool folds() const { return folds_; }
  int graph_count() const { return int(slots_[0].graphs.size() + slots_[1].graphs.size()); }
  MemoryUse memory_use() const;

 private:
  static constexpr int kSlots = 2;

  // The key of a graph: batches of one task, which all sequences request, by token and sequence bucket.
  using GraphKey = std::tuple<Task, int, int>;

  // What the host knows of a forward pass.
  struct Plan {
    int rows;       // tokens, or the bucket that they are rounded up to
    int sequences;  // likewise
    int tiles, shorts;
    int longest;                          // at least the tokens of the longest sequence
    const uint8_t* input;                 // in InputLayout(rows, sequences)
    TaskOutputs outputs;                  // the requested tasks and their destinations
    bool on_host = false;                 // `input` is host memory
    const int* positions = nullptr;       // [rows] in host memory, in place of those of offsets.cu
    const int* cu_seqlens = nullptr;      // in host memory, where they are known
    const SpladeAnswer* pairs = nullptr;  // destination of pairs
  };
  struct Slot {
    HostBuffer input, positions;
    HostBuffer direct_output;  // heads write it; its address never changes
    HostBuffer output;         // answers are copied into it
    HostBuffer lists;          // the lists of `chosen` of all parts
    DeviceBuffer device_input, device_lists;
    DeviceBuffer vectors;  // answers except TOKENS and pairs
    SpladeAnswer pairs;
    cudaEvent_t copied = nullptr, computed = nullptr, done = nullptr;
    std::map<GraphKey, cudaGraphExec_t> graphs;
    bool in_flight = false, direct = false;
    int64_t ticket = 0;
    int tokens = 0, sequences = 0;
    bool has_positions = false;
    TaskOutputs outputs;
  };

  Encoder(const EncoderConfig& model, const EncoderOptions& options)
      : model_(model), options_(options), weights_(model) {}

  // The steps of `create`.
  Status init();
  Status choose_kernels(bool is_hopper, const Build& build);
  Status make_gemm(bool is_hopper, const Build& build);
  Status allocate_activations();
  Status allocate_slots();

  // The steps of `start`.
  Status prepare_gemms();
  Status prepare_gemm(size_t i, std::unique_ptr<Linear>& created);
  Status prepare_multi_vectors();
  struct FullBatch;
  Status warm_up(std::string& fold_refusal);
  Status warm_up_heads();
  Status check_offset(std::string& fold_refusal);
  Status capture_graphs();
  Status capture(Slot& slot, const GraphKey& key);

  // A batch.
  Status forward(const Plan& plan, const Stream& stream);
  // State that the ops of a forward pass hand to each other.
  struct Replay {
    const Plan& plan;
    AttentionWork work;
    Stream stream;
    int count;                           // of rows
    std::array<RowView, kBuffers> rows;  // as the last op left them
    int gathers_after = -1;              // the layer after whose attention only the rows that heads read are processed
    Pooling gathered = Pooling::kCls;    // which rows those are
  };
  Status run_op(const Op& op, Replay& replay);
  Status embed_batch(const Op& op, Replay& replay);
  Status attend(const Op& op, Replay& replay);
  uint8_t* memory_of(Buffer place) const;
  // What rows before a norm are multiplied by; null: nothing.
  const float* factors_of(const NormRef& norm) const;
  float2* stats_of(Buffer place) const { return place == Buffer::kX ? buffers_.x_stats : buffers_.sum_stats; }
  RopeColumns rope_columns(int layer) const;
  // Whether all requested tasks read the same single row of a sequence, and which: as a pooling mode.
  bool reads_one_row(const TaskOutputs& outputs, Pooling& pooling) const;
  // heads.cpp. gathered: x has one row a sequence.
  Status run_heads(const Plan& plan, const RowView& x, bool gathered, const Stream& stream);
  Status embed_head(const Plan& plan, const RowView& x, bool gathered, const Stream& stream);
  Status classification_head(const Plan& plan, const RowView& x, bool gathered, const Stream& stream);
  Status multi_vector_head(const Plan& plan, const Stream& stream);
  Status splade_head(const Plan& plan, const Stream& stream);
  float* layer_scratch(int half) const;
  // The pairs of a completed batch. Sequences whose pairs did not fit run again, as many at a time as fit.
  Status collect_pairs(Slot& slot, Answer& answer);
  Status run_again(Slot& slot, const BatchView& batch);
  // What remains to be applied to the last layer's rows.
  Norm last_norm() const { return weights_.norm(program_.last); }
  // While the first batch is inspected, records the largest |μ|/σ of its rows before a LayerNorm.
  Status inspect(const RowView& rows, int count, const Stream& stream);
  Status submit_small(Slot& slot, const BatchView& batch, const GraphKey& key);
  Status submit_large(Slot& slot, const BatchView& batch, const Plan& plan);
  // Queues the copies of a batch's answers to the host.
  Status download(Slot& slot);
  // Plans a batch that is not small. All errors of invalid input arise here, before anything is queued.
  Status plan_large(Slot& slot, const BatchView& batch, Plan& plan);
  // After a failure with work queued. On return no kernel or copy reads or writes a slot any more.
  Status drain(Status failed);
  const Slot* find_slot(int64_t ticket) const;
  // Whether a graph serves this batch, and which.
  static bool key_of(const BatchView& batch, Tasks requested, GraphKey& key);
  // Memory of a slot: floats of answers on the device and in total, and indices in lists.
  Status reserve(Slot& slot, size_t own_floats, size_t floats, size_t listed);
  Status record_loss(Status status);

  EncoderConfig model_;
  EncoderOptions options_;
  Weights weights_;
  std::unique_ptr<GemmProvider> gemm_;
  std::unique_ptr<TensorMaps> maps_;  // of attention; null: the portable kernels
  Program program_;
  struct Gemm {
    std::unique_ptr<Linear> linear;
    std::unique_ptr<FeedForward> fused;  // fused with the GEMM after it
  };
  std::vector<Gemm> gemms_;                     // of the program's GEMMs
  std::vector<std::unique_ptr<Linear>> multi_;  // of the multi-vector head
  std::unique_ptr<SpladeHead> splade_;          // null: the model has none
  DeviceBuffer arena_;
  struct {
    uint8_t *x, *sum, *shared;  // [rows, hidden], [rows, hidden], [rows, program_.widest] or the heads' maximum
    int* zeros;                 // [rows]; null: the model has a table of positions
    float2 *x_stats, *sum_stats;
    QuantizedRows quantized;  // [rows, the widest rows that a layer's GEMMs read]; with int8
    OffsetsOutput offsets;
  } buffers_{};
  std::array<Slot, kSlots> slots_;
  std::shared_ptr<HostBlocks> blocks_ = std::make_shared<HostBlocks>();  // of answers
  Stream stream_;
  cudaStream_t uploads_ = nullptr, downloads_ = nullptr;
  bool folds_ = false;
  bool prescaled_rows_ = false;  // where a folded LayerNorm's gamma goes: gemm/gemm.h
  DeviceBuffer largest_offset_;  // the largest |μ|/σ of a row; allocated only while the first batch is inspected
  int row_capacity_ = 0, sequence_capacity_ = 0, tile_capacity_ = 0;
  size_t free_before_ = 0;
  std::string lost_;  // why the encoder can no longer be used
};

}  // namespace embert
