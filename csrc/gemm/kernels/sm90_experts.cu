// Routed feed-forward networks in two grouped GEMMs: rows lie by expert, in whole tiles of a cluster, and each tile
// multiplies its own expert's W. Which expert that is, and how many tiles there are, only the device knows.

#include "common/memory.h"
#include "gemm/kernels/pingpong.cuh"
#include "gemm/kernels/sm90.h"
#include "gemm/kernels/sm90_launch.cuh"
#include "ops/experts.h"

namespace embert::sm90 {
namespace {

// As TileScheduler. `column_of` is a row of all experts' W. A tile takes thousands of cycles, so the cost of its
// divisions does not matter.
template <typename Shape>
struct ExpertScheduler {
  const int* tiles;     // RoutedRows::tiles
  int columns, w_rows;  // of an expert: in tiles, and of W
  int first, stride, end;
  int rank;  // of the block in its cluster

  __device__ __forceinline__ ExpertScheduler(const GemmArguments& args, const int* tiles)
      : tiles(tiles), columns((args.n + Shape::kColumns - 1) / Shape::kColumns), w_rows(args.n) {
    rank = cluster_rank();
    first = blockIdx.x / kCluster;
    stride = gridDim.x / kCluster;
    end = columns * *tiles;
  }
  __device__ __forceinline__ int row_of(int tile) const { return (row_tile(tile) * kCluster + rank) * Shape::kRows; }
  __device__ __forceinline__ int y_column_of(int tile) const {
    return (tile - row_tile(tile) * columns) * Shape::kColumns;
  }
  __device__ __forceinline__ int column_of(int tile) const {
    return tiles[1 + row_tile(tile)] * w_rows + y_column_of(tile);
  }
  __device__ __forceinline__ static constexpr int columns_of(int /* any tile */) { return Shape::kColumns; }
  __device__ __forceinline__ int row_tile(int tile) const { return uint32_t(tile) / uint32_t(columns); }
};

template <typename T, Activation kActivation>
__global__ void __launch_bounds__(PingPongShape::kThreads, 1)
    experts_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                   const __grid_constant__ CUtensorMap y_map, const GemmArguments args, const int* tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Scheduler = ExpertScheduler<PingPongShape>;
  using Epilogue = StoreEpilogue<T, kActivation, true, false, Scheduler>;
  static_assert(PingPongShape::kRows * kCluster == kExpertTile, "a tile of a cluster has one expert");
  extern __shared__ __align__(1024) uint8_t smem[];  // a swizzle pattern is 1 024 bytes
  if (threadIdx.x == 32) prefetch_tensor_maps(x_map, w_map, y_map);
  init_pingpong<true>(shared_address(smem));
  griddepcontrol_wait();  // for `tiles`
  const Scheduler scheduler(args, tiles);
  pingpong_mainloop<T, true>(
      shared_address(smem), scheduler, args.k, x_map, w_map,
      [&](int consumer, int consumer_row) { return Epilogue(smem, args, scheduler, y_map, consumer, consumer_row); });
#else
  EMBERT_TRAP("experts_kernel");
#endif
}

class ExpertsSm90 final : public Experts {
 public:
  ExpertsSm90(GemmSm90& owner, const ExpertWeights& weights) : owner_(owner), weights_(weights) {}

  Status init(const Stream& stream) {
    const size_t most = size_t(weights_.count) * std::max(weights_.hidden, weights_.columns) + kColumnPadding;
    EMBERT_TRY(zeros_.allocate(most * sizeof(float)));
    EMBERT_CUDA(cudaMemsetAsync(zeros_.as(), 0, zeros_.bytes(), stream.handle));
    return {};
  }

  Status run(const void* x, int rows, const RoutedRows& routed, void* inner, void* y, Stream& stream) override {
    if (rows == 0) return {};
    const int tiles = int(max_expert_tiles(routed.kind, rows));
    // y's memory holds the grouped rows until the second product.
    EMBERT_TRY(group_rows(owner_.dtype(), x, rows, weights_.hidden, routed, y, stream));
    return with_half_dtype(owner_.dtype(), [&](auto type) -> Status {
      using T = decltype(type);
      EMBERT_TRY(with_activation(weights_.activation, [&](auto activation) {
        return multiply(experts_kernel<T, decltype(activation)::value>, y, weights_.inner, weights_.columns,
                        weights_.hidden, inner, routed.tiles, tiles, stream);
      }));
      return multiply(experts_kernel<T, Activation::kNone>, inner, weights_.out, weights_.hidden, weights_.columns, y,
                      routed.tiles, tiles, stream);
    });
  }

 private:
  template <typename Kernel>
  Status multiply(Kernel kernel, const void* x, const void* w, int out, int in, void* y, const int* tiles, int most,
                  const Stream& stream) {
    using Shape = PingPongShape;
    GemmArguments args{};
    args.columns = zeros_.as();
    args.y = y;
    args.m = most * kExpertTile, args.n = out, args.k = in;
    const CUtensorMap *x_map = nullptr, *w_map = nullptr, *y_map = nullptr;
    EMBERT_TRY(owner_.map({x, args.m, in, Shape::kRows, 64}, x_map));
    EMBERT_TRY(owner_.map({w, weights_.count * out, in, Shape::kWShare, 64}, w_map));
    EMBERT_TRY(owner_.map({y, args.m, out, 16, 64}, y_map));  // a warp's rows
    return launch_persistent<Shape>("experts", owner_, kernel, most * tiles_of(out, Shape::kColumns), stream, *x_map,
                                    *w_map, *y_map, args, tiles);
  }

  GemmSm90& owner_;
  ExpertWeights weights_;
  DeviceBuffer zeros_;  // the constants of columns: single experts have no biases
};

}  // namespace

Status GemmSm90::prepare_experts(const ExpertWeights& weights, const Stream& stream,
                                 std::unique_ptr<Experts>& experts) {
  auto grouped = std::make_unique<ExpertsSm90>(*this, weights);
  EMBERT_TRY(grouped->init(stream));
  experts = std::move(grouped);
  return {};
}

}  // namespace embert::sm90
