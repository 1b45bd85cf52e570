// down h of the routed experts and of the shared one for tiles of many tokens, a row of `outputs` for each position.
// MIN_BLOCKS; and the macros of many_experts.cuh.
#include "moe/many_experts.cuh"

constexpr int BLOCK_ROWS = 16 * ROW_TILES * WARPS, BLOCKS = HIDDEN / BLOCK_ROWS;
static_assert(HIDDEN % BLOCK_ROWS == 0, "whole blocks of rows");

template <typename Format, int COLUMNS>
__device__ __forceinline__ void run(const Weights& experts, bool is_shared, int block, const Lists& lists,
                                    const bf16* hidden, float* outputs) {
  DYNAMIC_SHARED(uint8, shared);
  __shared__ int token_rows[TILE_TOKENS];
  const Tile tile = lists.tile(is_shared, block / BLOCKS);
  if (tile.count == 0) return;
  for (int i = threadIdx.x; i < TILE_TOKENS; i += THREADS) token_rows[i] = tile.first + (i < tile.count ? i : 0);
  const int lane = threadIdx.x % WARP;
  const int row = block % BLOCKS * BLOCK_ROWS + threadIdx.x / WARP * (16 * ROW_TILES) + lane / 4;
  const Weights weights = matrix<Format>(experts, tile.expert, HIDDEN, COLUMNS);
  const LaneRows<Format, COLUMNS, ROW_TILES, 16> rows(weights, row, row + 8);
  const float scale = sum_scale<Format>(weights, 0);
  __syncthreads();
  with_token_tiles<TOKEN_TILES>(tile.count, [&](auto tiles) {
    constexpr int N = decltype(tiles)::value;
    float sums[ROW_TILES][N][4];
    TokenTile<Format, COLUMNS, ROW_TILES, 16, N, STAGES>::multiply(shared, rows,
                                                                  TokenRows<HIDDEN_PITCH>{hidden, token_rows}, sums);
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int right = 0; right < 2; ++right) {
        const int token = 8 * n + lane % 4 * 2 + right;
        if (token >= tile.count) continue;
        float* to = outputs + int64(tile.first + token) * HIDDEN + row;
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
          to[16 * m] = sums[m][n][right] * scale;
          to[16 * m + 8] = sums[m][n][2 + right] * scale;
        }
      }
  });
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
many_down(const void* values, const void* block_scales, const float* global_scales, const void* shared_values,
          const void* shared_block_scales, const float* shared_global_scales, const bf16* hidden, const int4* tiles,
          const int* num_tiles, const int* query_start_loc, const int* num_seqs, float* outputs, int first_token,
          int tokens, int shared_blocks) {
  const Weights routed = {values, block_scales, global_scales};
  const Weights shared = {shared_values, shared_block_scales, shared_global_scales};
  const Lists lists = {tiles, num_tiles, query_start_loc, num_seqs, first_token, tokens};
  const bool is_shared = int(blockIdx.x) < shared_blocks;
  const int block = is_shared ? blockIdx.x : blockIdx.x - shared_blocks;
  wait_for_previous();
  start_next();
  if constexpr (ALIKE) {
    run<ROUTED, INNER>(select(is_shared, shared, routed), is_shared, block, lists, hidden, outputs);
  } else if (is_shared) {
    run<SHARED, SHARED_INNER>(shared, true, block, lists, hidden, outputs);
  } else {
    run<ROUTED, INNER>(routed, false, block, lists, hidden, outputs);
  }
}
