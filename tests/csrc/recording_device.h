// CUDA's runtime and the kernels' launchers, each of which only writes down what it is asked to do: a name and
// key=value pairs a line; addresses are offsets into one pool, -1 is null. And a small model's weights for the encoder
// before it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "encoder/encoder.h"

extern bool telling;       // whether anything is written
extern int pairs_of_text;  // that SPLADE's head is said to find

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

constexpr int kPositions = 512, kRelativePositions = 500;  // the latter no multiple of a tile
constexpr int kHidden = 256, kInner = 1024, kLayers = 3, kHeads = 4, kVocabulary = 1000;

// Prints "refused" and the message, and ends the program.
void check(const embert::Status& status);

embert::EncoderConfig small_model();

// The same with what newer encoders have: small ones of ModernBERT's, Nomic's, GTE's, ELECTRA's, ALBERT's,
// JinaBERT's and Qwen3's kind.
enum class Kind : int { kBert, kRelative, kModern, kNomic, kGte, kElectra, kAlbert, kJina, kQwen };
constexpr int kRotaryDim = 48, kWindow = 40, kEmbedding = 128;  // columns of a head; tokens; columns
embert::EncoderConfig model_of(Kind kind);

enum class Stored : int { kFloat16 = 0, kFloat32 = 1, kVectorsInFloat32 = 2 };

// All weights but those called `without`. Of layer i they are 10·i and 1 for query, 2 for key, 3 for value, 4 for
// inner, 5 for gate; the others are 0. In FP16 all are 0.
void load(embert::Encoder& encoder, Stored stored, const std::string& without = "");
// Zeros for all heads that the model has.
void load_heads(embert::Encoder& encoder);
