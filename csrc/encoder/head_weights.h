// The weights of a model's task heads: memory layout and names.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "common/dtype.h"
#include "common/memory.h"
#include "heads/dense.h"
#include "heads/task_heads.h"

namespace embert {

using TensorShape = std::vector<size_t>;  // [rows, columns] or [elements]

// A tensor's destination, with its shape and type there.
struct WeightView {
  void* to = nullptr;
  TensorShape shape;
  DType dtype = DType::kFloat32;
  size_t pitch = 0;    // elements from row to row; 0: as many as a row has
  bool apart = false;  // gaps between rows belong to another tensor; otherwise they are zeros
};

// A layer of the multi-vector head, for the encoder's GEMMs.
struct HeadGemmWeights {
  DenseShape shape;
  uint8_t* weight;  // [out, in] of the encoder's type
  float* bias;      // [out]
};

// Names with an index, of a linear layer: dense, classifier and multi, each .weight [out, in] and .bias [out]. Without
// an index (−1): token_weights.weight [1, hidden], token_weights.bias [1]. A layer without a bias is loaded with zeros.
class HeadWeights {
 public:
  // Allocates what `heads` needs. The same calls each time: without a base they only compute the size.
  void lay_out(Arena& arena, const TaskHeads& heads, int hidden, DType dtype);
  bool find(const std::string& name, int index, WeightView& place) const;
  std::vector<std::pair<int, std::string>> names() const;  // of all required tensors
  size_t largest() const;                                  // elements of the largest one

  const std::vector<DenseLayer>& dense() const { return dense_; }
  const std::vector<DenseLayer>& classifier() const { return classifier_; }
  const std::vector<HeadGemmWeights>& multi() const { return multi_; }
  const float* token_weight() const { return token_weight_; }  // [hidden]
  const float* token_bias() const { return token_bias_; }      // [1]

 private:
  TaskHeads heads_;
  int hidden_ = 0;
  DType dtype_ = DType::kFloat16;
  std::vector<DenseLayer> dense_, classifier_;
  std::vector<HeadGemmWeights> multi_;
  float *token_weight_ = nullptr, *token_bias_ = nullptr;
};

}  // namespace embert
