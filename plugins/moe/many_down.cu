// down h of the routed experts and of the shared one for tiles of many tokens, a row of `outputs` for each position: of the
// HIDDEN elements, `count` from `first_output` on. MIN_BLOCKS; and the macros of many_experts.cuh.
#include "moe/many_experts.cuh"

// What a block works on, in shared memory: it would take registers from the product.
struct Task {
  Tile tile;
  uint32 offsets[TILE_TOKENS];  // of the tokens in `hidden`, in bytes
};
struct Outputs {
  float* rows;
  int first, count;
};

template <int M, int N>
__device__ __forceinline__ void store_outputs(const float (&sums)[M][N][4], float scale, const Tile& tile, float* to,
                                              int pitch) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int right = 0; right < 2; ++right) {
      const int token = 8 * n + threadIdx.x % 4 * 2 + right;
      if (token >= tile.count) continue;
      float* row = to + int64(tile.first + token) * pitch;
#pragma unroll
      for (int m = 0; m < M; ++m) {
        row[16 * m] = sums[m][n][right] * scale;
        row[16 * m + 8] = sums[m][n][2 + right] * scale;
      }
    }
}

// So many parts of rows of a tile.
template <typename Format, int COLUMNS, int M, int STAGES>
__device__ __forceinline__ void run(const Weights& experts, const Tile& tile, int first_part, int parts,
                                    const bf16* hidden, const Outputs& outputs) {
  DYNAMIC_SHARED(uint8, shared);
  __shared__ Task task;
  constexpr int PART_ROWS = 16 * M * WARPS;
  __syncthreads();  // of a tile before this one
  for (int i = threadIdx.x; i < TILE_TOKENS; i += THREADS)
    task.offsets[i] = (tile.first + (i < tile.count ? i : 0)) * uint32(HIDDEN_PITCH * sizeof(bf16));
  if (threadIdx.x == 0) task.tile = tile;
  __syncthreads();
  with_token_tiles<TOKEN_TILES>(tile.count, [&](auto tiles) ALWAYS_INLINE {
    constexpr int N = decltype(tiles)::value;
    using Product = TokenTile<Format, COLUMNS, 8, M, 16, N, STAGES>;
    const int row = first_part * PART_ROWS + threadIdx.x / WARP * (16 * M);
    const typename Product::Rows rows(matrix<Format>(experts, tile.expert, HIDDEN, COLUMNS), outputs.first + row);
    float* to = outputs.rows + row + threadIdx.x % WARP / 4;
    Product::multiply(shared, rows, {hidden, task.offsets}, parts, [&](const float(&sums)[M][N][4]) ALWAYS_INLINE {
      const float scale = sum_scale<Format>(matrix<Format>(experts, task.tile.expert, HIDDEN, COLUMNS), 0);
      store_outputs(sums, scale, task.tile, to, outputs.count);
      to += PART_ROWS;
    });
  });
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
many_down(const void* values, const void* block_scales, const float* global_scales, const void* shared_values,
          const void* shared_block_scales, const float* shared_global_scales, const bf16* hidden, const int4* tiles,
          const int* num_tiles, const int* query_start_loc, const int* num_seqs, float* rows, int first_output,
          int count, int first_token, int tokens) {
  const Weights routed = {values, block_scales, global_scales};
  const Weights shared = {shared_values, shared_block_scales, shared_global_scales};
  const Lists lists = {tiles, num_tiles, query_start_loc, num_seqs, first_token, tokens};
  const Outputs outputs = {rows, first_output, count};
  const int routed_parts = count / (16 * ROUTED_ROW_TILES * WARPS), shared_parts = count / (16 * SHARED_ROW_TILES * WARPS);
  wait_for_previous();
  start_next();
  run_share(lists, routed_parts, shared_parts, [&](bool is_shared, const Tile& tile, int first_part, int parts) ALWAYS_INLINE {
    if constexpr (ALIKE) {
      run<ROUTED, INNER, ROUTED_ROW_TILES, ROUTED_STAGES>(select(is_shared, shared, routed), tile, first_part, parts,
                                                          hidden, outputs);
    } else if (is_shared) {
      run<SHARED, SHARED_INNER, SHARED_ROW_TILES, SHARED_STAGES>(shared, tile, first_part, parts, hidden, outputs);
    } else {
      run<ROUTED, INNER, ROUTED_ROW_TILES, ROUTED_STAGES>(routed, tile, first_part, parts, hidden, outputs);
    }
  });
}
