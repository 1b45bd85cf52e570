// down h of the routed experts and of the shared one for tiles of many tokens, a row of `outputs` for each position: of OUTPUTS
// of HIDDEN elements, those from `first_output` on. A block goes through ROW_PARTS times as many as its warps have room
// for. MIN_BLOCKS; and the macros of many_experts.cuh.
#include "moe/many_experts.cuh"

constexpr int PART_ROWS = 16 * ROW_TILES * WARPS, BLOCKS = OUTPUTS / (PART_ROWS * ROW_PARTS);
static_assert(OUTPUTS % (PART_ROWS * ROW_PARTS) == 0, "whole blocks of rows");

// What a block works on, in shared memory: it would take registers from the product.
struct Task {
  Tile tile;
  uint32 offsets[TILE_TOKENS];  // of the tokens in `hidden`, in bytes
};

template <int N>
__device__ __forceinline__ void store_outputs(const float (&sums)[ROW_TILES][N][4], float scale, const Tile& tile,
                                              float* to) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int right = 0; right < 2; ++right) {
      const int token = 8 * n + threadIdx.x % 4 * 2 + right;
      if (token >= tile.count) continue;
      float* row = to + int64(tile.first + token) * OUTPUTS;
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m) {
        row[16 * m] = sums[m][n][right] * scale;
        row[16 * m + 8] = sums[m][n][2 + right] * scale;
      }
    }
}

template <typename Format, int COLUMNS, int STAGES>
__device__ __forceinline__ void run(const Weights& experts, bool is_shared, int block, const Lists& lists,
                                    const bf16* hidden, float* outputs, int first_output) {
  DYNAMIC_SHARED(uint8, shared);
  __shared__ Task task;
  const Tile tile = lists.tile(is_shared, block / BLOCKS);
  if (tile.count == 0) return;
  for (int i = threadIdx.x; i < TILE_TOKENS; i += THREADS)
    task.offsets[i] = (tile.first + (i < tile.count ? i : 0)) * uint32(HIDDEN_PITCH * sizeof(bf16));
  if (threadIdx.x == 0) task.tile = tile;
  __syncthreads();
  with_token_tiles<TOKEN_TILES>(tile.count, [&](auto tiles) {
    constexpr int N = decltype(tiles)::value;
    using Product = TokenTile<Format, COLUMNS, 8, ROW_TILES, 16, N, STAGES>;
    const int row = block % BLOCKS * (PART_ROWS * ROW_PARTS) + threadIdx.x / WARP * (16 * ROW_TILES);
    const typename Product::Rows rows(matrix<Format>(experts, tile.expert, HIDDEN, COLUMNS), first_output + row);
    float* to = outputs + row + threadIdx.x % WARP / 4;
    Product::multiply(shared, rows, {hidden, task.offsets}, ROW_PARTS, [&](const float(&sums)[ROW_TILES][N][4]) {
      const float scale = sum_scale<Format>(matrix<Format>(experts, task.tile.expert, HIDDEN, COLUMNS), 0);
      store_outputs<N>(sums, scale, task.tile, to);
      to += PART_ROWS;
    });
  });
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
many_down(const void* values, const void* block_scales, const float* global_scales, const void* shared_values,
          const void* shared_block_scales, const float* shared_global_scales, const bf16* hidden, const int4* tiles,
          const int* num_tiles, const int* query_start_loc, const int* num_seqs, float* outputs, int first_output,
          int first_token, int tokens, int shared_blocks) {
  const Weights routed = {values, block_scales, global_scales};
  const Weights shared = {shared_values, shared_block_scales, shared_global_scales};
  const Lists lists = {tiles, num_tiles, query_start_loc, num_seqs, first_token, tokens};
  const bool is_shared = int(blockIdx.x) < shared_blocks;
  const int block = is_shared ? blockIdx.x : blockIdx.x - shared_blocks;
  wait_for_previous();
  start_next();
  if constexpr (ALIKE) {
    run<ROUTED, INNER, ROUTED_STAGES>(select(is_shared, shared, routed), is_shared, block, lists, hidden, outputs, first_output);
  } else if (is_shared) {
    run<SHARED, SHARED_INNER, SHARED_STAGES>(shared, true, block, lists, hidden, outputs, first_output);
  } else {
    run<ROUTED, INNER, ROUTED_STAGES>(routed, false, block, lists, hidden, outputs, first_output);
  }
}
