// Routed feed-forward networks over packed rows: a router chooses experts for each row, and their outputs are added.
// The choice is of a row alone, so no result depends on the batch.
#pragma once

#include <algorithm>

#include "common/launch.h"
#include "common/types.h"
#include "ops/norm.h"

namespace embert {

constexpr int kMaxExperts = 32;   // a lane each
constexpr int kExpertTile = 256;  // rows of a tile that multiplies one expert's rows: those of a cluster
constexpr int kRoutedRows = 32;   // that a block counts

struct ExpertKind {
  int experts = 0, top_k = 0;  // of the model, of a row
};

// An expert of a row, and the factor of its output.
struct Route {
  int expert;
  float share;
};

// The experts of a batch's rows, on the device.
struct RoutedRows {
  ExpertKind kind;
  Route* routes = nullptr;  // [rows, top_k], in the order of the experts
  int* slots = nullptr;     // [rows, top_k]: where the experts' outputs are
  int* counts = nullptr;    // [blocks of kRoutedRows rows, experts]
  int* tiles = nullptr;     // their number, then the expert of each: rows grouped by expert, in whole tiles
};

// The most tiles of a batch's rows.
inline size_t max_expert_tiles(const ExpertKind& kind, size_t rows) {
  const size_t outputs = rows * kind.top_k;
  return outputs / kExpertTile + std::min(outputs, size_t(kind.experts));
}

// Chooses each row's experts: the largest of softmax(weight · x), in FP32. weight: [experts, hidden]. Writes routes,
// counts, and slots as if an expert's outputs were [rows, hidden], one expert after another.
Status route_rows(DType dtype, const void* x, const float* weight, int rows, int hidden, const RoutedRows& routed,
                  const Stream& stream);

// Copies rows to their experts' tiles, y [tiles · kExpertTile, hidden], and writes slots and tiles. Rows between those
// of two experts stay as they are.
Status group_rows(DType dtype, const void* x, int rows, int hidden, const RoutedRows& routed, void* y,
                  const Stream& stream);

// y[rows, hidden] = LayerNorm(x + bias + Σ share · output); y may be x.
Status combine_rows(DType dtype, const void* x, const void* outputs, const RoutedRows& routed, const float* bias,
                    const Norm& norm, int rows, int hidden, float epsilon, void* y, const Stream& stream);

}  // namespace embert
