// A model on one CUDA device: its weights, its program, the GEMMs prepared for them, and memory for activations.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/capability.h"
#include "common/launch.h"
#include "common/memory.h"
#include "common/tensor_maps.h"
#include "encoder/activations.h"
#include "encoder/encoder_config.h"
#include "encoder/program.h"
#include "encoder/weights.h"
#include "gemm/gemm.h"
#include "heads/splade.h"

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

struct DeviceModel {
  explicit DeviceModel(const EncoderConfig& config) : config(config), weights(config) {}

  // Allocates memory for weights, and selects the kernels.
  Status create(const EncoderOptions& options, bool is_hopper, const Build& build, Stream& stream);
  // Allocates memory for activations, which a decider shares; null: there is none.
  Status allocate_activations(int max_tokens, DeviceModel* decider, const Stream& stream);
  // Prepares the GEMMs for the loaded weights.
  Status prepare(const Stream& stream);

  EncoderConfig config;
  Weights weights;
  std::unique_ptr<GemmProvider> provider;
  std::unique_ptr<TensorMaps> maps;  // of attention; null: the portable kernels
  bool folds = false;
  Program program;
  struct Gemm {
    std::unique_ptr<Linear> linear;
    std::unique_ptr<FeedForward> fused;  // fused with the GEMM after it
  };
  std::vector<Gemm> gemms;                        // of the program's GEMMs
  std::vector<std::unique_ptr<Experts>> experts;  // of each layer; null: it has none
  std::vector<std::unique_ptr<Linear>> multi;     // of the multi-vector head
  std::unique_ptr<SpladeHead> splade;             // null: the model has none
  Activations activations;
  DeviceBuffer
      largest_offset;  // the largest |μ|/σ of a row before a LayerNorm; allocated only while rows are inspected

  RopeColumns rope_columns(int layer) const;
  // The norm that still has to be applied to the last layer's rows.
  Norm last_norm() const { return weights.norm(program.last); }
};

}  // namespace embert
