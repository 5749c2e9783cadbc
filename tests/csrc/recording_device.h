// Stand-ins for CUDA's runtime (recording_runtime.cpp), for the kernels' launchers (computing_device.cpp), and a small
// model with its weights (small_models.cpp). They write down some of the calls: a name and key=value pairs a line;
// addresses are offsets into one pool, -1 is null.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "encoder/encoder.h"

extern bool computes;      // kernels compute
extern bool telling;       // calls are written down
extern int pairs_of_text;  // that SPLADE's head finds

// Properties of the device, and the calls that fail: a count of calls that still succeed, -1: all.
struct Faults {
  int major = 9, minor = 0;
  embert::Build build = {900, true};
  embert::Status told_build;
  int allocations = -1, instantiations = -1, attentions = -1;
  embert::Status attention;
};
extern Faults faults;

// Made and not destroyed yet.
struct Living {
  int allocations = 0, streams = 0, events = 0, graphs = 0, executables = 0;
};
extern Living living;

// An address's place in the pool; -1: null.
long at(const void* address);
// Counts down; the call that finds 0 fails, and so does each after it.
bool fails(int& calls_left);

template <typename... Values>
void tell(const char* format, Values... values) {
  if (!telling) return;
  if constexpr (sizeof...(values) == 0)
    std::fputs(format, stdout);
  else
    std::printf(format, values...);
}

constexpr int kPositions = 512, kHidden = 256, kInner = 1024, kLayers = 3, kHeads = 4, kVocabulary = 1000;
constexpr int kRotaryDim = 48;  // columns of a head

// Prints "refused" and the message, and ends the program.
void check(const embert::Status& status);

// A small BERT, and small models with what newer encoders have: ModernBERT's, Nomic's, GTE's, ELECTRA's, ALBERT's and
// JinaBERT's kind.
enum class Kind : int { kBert, kRelative, kModern, kNomic, kGte, kElectra, kAlbert, kJina };
embert::EncoderConfig model_of(Kind kind);

// Zeros for all weights, in FP32 or int8, but for those called `without`.
void load(embert::Encoder& encoder, const std::string& without = "");

// A batch of sequences with these lengths.
struct Batch {
  std::vector<int32_t> cu_seqlens{0}, ids;
  embert::BatchView view;

  explicit Batch(const std::vector<int>& lengths);
};
