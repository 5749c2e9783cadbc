// A BERT-family encoder on one CUDA device: weights, activations, staging memory, graphs. Two batches may be in flight.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/capability.h"
#include "device/launch.h"
#include "device/memory.h"
#include "device/tensor_maps.h"
#include "embedding/embedding.h"
#include "gemm/linear.h"
#include "model/shape.h"
#include "model/weights.h"
#include "runtime/batch.h"

namespace embert {

enum class Task : int { kEmbed = 0, kTokens = 1 };

struct EncoderOptions {
  int device = 0;
  int max_tokens = 16384;
  std::string gemm = "auto";     // "auto", "hopper", "cublaslt"
  std::string cublaslt_library;  // file name or path; empty: the loader's own search
  bool fold = true;              // fold LayerNorms into the products, where the GEMM can
  bool graphs = true;            // capture small batches' forwards at start
};

struct MemoryUse {
  size_t weights, activations, total;  // bytes; total: by how much the device's free memory shrank
};

class Encoder {
 public:
  static Status create(const ModelShape& shape, const EncoderOptions& options, std::unique_ptr<Encoder>& made);
  ~Encoder();
  Encoder(const Encoder&) = delete;
  Encoder& operator=(const Encoder&) = delete;

  // Uploads one tensor; names and shapes as in model/weights.h. First all tensors, then `start`, then batches.
  Status load(const std::string& name, int layer, const void* host, const TensorShape& shape, DType stored);
  // Prepares the products, warms up, captures graphs. Where LayerNorms cannot be folded into these weights,
  // `fold_refusal` says why, and the encoder is not started: make another one that does not fold.
  Status start(std::string& fold_refusal);

  // Starts a forward. Its ticket goes to `wait`, once. Refused while two are in flight, for a batch that cannot be run,
  // and when memory runs out; a refused batch leaves nothing behind. Tickets are unique in a process, so one that was
  // redeemed, or is another encoder's, is recognised.
  Status submit(const BatchView& batch, Task task, int64_t& ticket);
  bool is_in_flight(int64_t ticket) const { return find_slot(ticket) != nullptr; }
  // The rows of the answer of a ticket in flight: B or T.
  int rows_of(int64_t ticket) const { return find_slot(ticket)->rows; }
  Status wait(int64_t ticket, float* out);  // [rows, hidden]

  const ModelShape& shape() const { return shape_; }
  const char* gemm_name() const { return gemm_->name(); }
  bool folds() const { return folds_; }
  int graph_count() const { return int(slots_[0].graphs.size() + slots_[1].graphs.size()); }
  MemoryUse memory_use() const;

 private:
  static constexpr int kSlots = 2;

  // What a forward needs to know on the host.
  struct Plan {
    int rows;       // tokens, or the bucket they were rounded up to
    int sequences;  // likewise
    int tiles, shorts;
    int longest;                     // at least the tokens of the longest sequence
    const uint8_t* input;            // in InputLayout(rows, sequences)
    float* vectors;                  // device or mapped host memory
    bool on_host = false;            // `input` is host memory
    const int* positions = nullptr;  // [rows] in host memory, in place of those of offsets.cu
  };
  struct Slot {
    HostBuffer input, positions;
    HostBuffer direct_output;  // the pooling kernel writes it; its address never changes
    HostBuffer output;         // vectors are copied into it
    DeviceBuffer device_input, vectors;
    cudaEvent_t copied = nullptr, computed = nullptr, done = nullptr;
    std::map<std::pair<int, int>, cudaGraphExec_t> graphs;  // by token and sequence bucket
    bool in_flight = false, direct = false;
    int64_t ticket = 0;
    int rows = 0;
  };

  Encoder(const ModelShape& shape, const EncoderOptions& options) : shape_(shape), options_(options), weights_(shape) {}

  // The steps of `create`.
  Status init();
  Status choose_kernels(bool is_hopper, const Build& build);
  Status make_gemm(bool is_hopper, const Build& build);
  Status allocate_activations();
  Status allocate_slots();

  // The steps of `start`.
  Status prepare_products();
  Status prepare_layer(int i);
  Status warm_up(std::string& fold_refusal);
  Status check_offset(std::string& fold_refusal);
  Status capture_graphs();
  Status capture(Slot& slot, std::pair<int, int> bucket);

  // A batch.
  Status forward(const Plan& plan, const Stream& stream);
  // The rest of a layer, for `count` rows; x is its output. `attended` and `residual` may lie in at_.wide: they have
  // been read when the inner activations are written there.
  Status after_attention(int layer, const Rows& attended, const Rows& residual, int count, Rows& x, Rows& sum,
                         Stream& along);
  // While the first batch is inspected, keeps the largest |μ|/σ of its rows before a LayerNorm.
  Status inspect(const Rows& rows, int count, const Stream& stream);
  Status submit_small(Slot& slot, const BatchView& batch, std::pair<int, int> bucket);
  Status submit_large(Slot& slot, const BatchView& batch, const Plan& plan, Task task);
  // Plans a batch that is not small: everything that may be refused comes here, before anything is queued.
  Status plan_large(Slot& slot, const BatchView& batch, Task task, Plan& plan);
  // After a failure with work queued. When this returns, no kernel or copy reads or writes a slot any more.
  Status come_to_rest(Status failed);
  const Slot* find_slot(int64_t ticket) const;
  bool pools_one_row() const { return shape_.pooling == Pooling::kCls || shape_.pooling == Pooling::kLast; }
  static bool bucket_of(const BatchView& batch, std::pair<int, int>& bucket);
  Status reserve_output(Slot& slot, size_t floats, bool on_device);
  Status remember(Status status);

  ModelShape shape_;
  EncoderOptions options_;
  Weights weights_;
  std::unique_ptr<GemmProvider> gemm_;
  std::unique_ptr<TensorMaps> maps_;  // of attention; null: the portable kernels
  struct LayerProducts {
    std::unique_ptr<Linear> qkv, attention_out;
    std::unique_ptr<FeedForward> feed_forward;
  };
  std::vector<LayerProducts> products_;
  DeviceBuffer arena_;
  struct {
    uint8_t *x, *sum, *wide;  // [rows, hidden], [rows, hidden], [rows, max(4·hidden, inner)]
    float2 *x_sums, *sum_sums;
    OffsetsOutput offsets;
  } at_{};
  std::array<Slot, kSlots> slots_;
  Stream stream_;
  cudaStream_t uploads_ = nullptr, downloads_ = nullptr;
  bool folds_ = false;
  bool gamma_in_rows_ = false;   // where a folded LayerNorm's gamma goes: gemm/linear.h
  DeviceBuffer largest_offset_;  // the largest |μ|/σ of a row; empty but while the first batch is inspected
  int row_capacity_ = 0, sequence_capacity_ = 0, tile_capacity_ = 0;
  size_t free_before_ = 0;
  std::string lost_;  // why the encoder cannot be used any more
};

}  // namespace embert
