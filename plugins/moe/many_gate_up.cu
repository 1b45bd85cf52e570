// silu(gate x) * (up x) of the routed experts and of the shared one, for tiles of many tokens: a 16-row tile is 8 gate rows
// and the 8 up rows beside them. MIN_BLOCKS; and the macros of many_experts.cuh.
#include "moe/many_experts.cuh"

// What a block works on, in shared memory: it would take registers from the product.
struct Task {
  Tile tile;
  uint32 offsets[TILE_TOKENS];  // of the tokens in x, in bytes
};

// Rounds the hidden elements and writes them in the order that the product with `down` wants: 8 M of each token, which a
// warp puts beside each other in `own` memory first, for a round of tokens at a time.
template <typename Format, int M, int N>
__device__ __forceinline__ void store_hidden(const float (&sums)[M][N][4], float gate_scale, float up_scale,
                                             const Tile& tile, bf16* to, uint8* own) {
  constexpr int PITCH = 16 * M + 16, TOGETHER = 4 / M;
  const int lane = threadIdx.x % WARP, place = TileFormat<Format>::arranged(lane / 4);
#pragma unroll
  for (int first = 0; first < N; first += TOGETHER) {
#pragma unroll
    for (int n = first; n < N && n < first + TOGETHER; ++n)
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int right = 0; right < 2; ++right) {
          const float value = silu(sums[m][n][right] * gate_scale) * (sums[m][n][2 + right] * up_scale);
          const int token = 8 * (n - first) + lane % 4 * 2 + right;
          *reinterpret_cast<bf16*>(own + token * PITCH + 16 * m + 2 * place) = from_float<bf16>(value);
        }
    __syncwarp();
    const int token = lane / M;
    if (8 * first + token < min(tile.count, 8 * N))
      *reinterpret_cast<uint4*>(to + int64(tile.first + 8 * first + token) * HIDDEN_PITCH + lane % M * 8) =
          *reinterpret_cast<const uint4*>(own + token * PITCH + lane % M * 16);
    __syncwarp();
  }
}

// So many parts of rows of a tile.
template <typename Format, int ROWS, int M, int STAGES>
__device__ __forceinline__ void run(const Weights& experts, const Tile& tile, int first_part, int parts, const bf16* x,
                                    const int* tokens, int shared_position, bf16* hidden) {
  DYNAMIC_SHARED(uint8, shared);
  __shared__ Task task;
  __shared__ __align__(16) uint8 staged[WARPS][32 / M * (16 * M + 16)];
  constexpr int PART_ROWS = 8 * M * WARPS;
  static_assert(ROWS % PART_ROWS == 0, "whole parts of rows");
  __syncthreads();  // of a tile before this one
  for (int i = threadIdx.x; i < TILE_TOKENS; i += THREADS) {
    const int position = tile.first + (i < tile.count ? i : 0);
    const int token = position < shared_position ? tokens[position] : position - shared_position;
    task.offsets[i] = token * uint32(HIDDEN * sizeof(bf16));
  }
  if (threadIdx.x == 0) task.tile = tile;
  __syncthreads();
  with_token_tiles<TOKEN_TILES>(tile.count, [&](auto tiles) ALWAYS_INLINE {
    constexpr int N = decltype(tiles)::value;
    using Product = TokenTile<Format, HIDDEN, ROWS, M, 8, N, STAGES>;
    const int warp = threadIdx.x / WARP, row = first_part * PART_ROWS + warp * (8 * M);
    const typename Product::Rows rows(matrix<Format>(experts, 2 * tile.expert, ROWS, HIDDEN), row);
    bf16* to = hidden + row;
    Product::multiply(shared, rows, {x, task.offsets}, parts, [&](const float(&sums)[M][N][4]) ALWAYS_INLINE {
      const Weights weights = matrix<Format>(experts, 2 * task.tile.expert, ROWS, HIDDEN);
      store_hidden<Format, M, N>(sums, sum_scale<Format>(weights, 0), sum_scale<Format>(weights, 1), task.tile, to,
                                 staged[warp]);
      to += PART_ROWS;
    });
  });
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
many_gate_up(const bf16* x, const bf16* arranged_x, const void* values, const void* block_scales,
             const float* global_scales, const void* shared_values, const void* shared_block_scales,
             const float* shared_global_scales, const int* tokens_by_position, const int4* tiles, const int* num_tiles,
             const int* query_start_loc, const int* num_seqs, bf16* hidden, int first_token, int tokens) {
  const Weights routed = {values, block_scales, global_scales};
  const Weights shared = {shared_values, shared_block_scales, shared_global_scales};
  const Lists lists = {tiles, num_tiles, query_start_loc, num_seqs, first_token, tokens};
  constexpr int ROUTED_PARTS = INNER / (8 * ROUTED_ROW_TILES * WARPS);
  constexpr int SHARED_PARTS = SHARED_INNER / (8 * SHARED_ROW_TILES * WARPS);
  wait_for_previous();
  start_next();
  x += int64(first_token) * HIDDEN;
  const bf16* routed_x = is_same<ROUTED, Bf16> ? x : arranged_x;
  const bf16* shared_x = is_same<SHARED, Bf16> ? x : arranged_x;
  run_share(lists, ROUTED_PARTS, SHARED_PARTS, [&](bool is_shared, const Tile& tile, int first_part, int parts) ALWAYS_INLINE {
    if constexpr (ALIKE) {
      run<ROUTED, INNER, ROUTED_ROW_TILES, ROUTED_STAGES>(select(is_shared, shared, routed), tile, first_part, parts,
                                                          routed_x, tokens_by_position, tokens * CHOICES, hidden);
    } else if (is_shared) {
      run<SHARED, SHARED_INNER, SHARED_ROW_TILES, SHARED_STAGES>(shared, tile, first_part, parts, shared_x,
                                                                 tokens_by_position, tokens * CHOICES, hidden);
    } else {
      run<ROUTED, INNER, ROUTED_ROW_TILES, ROUTED_STAGES>(routed, tile, first_part, parts, routed_x, tokens_by_position,
                                                          tokens * CHOICES, hidden);
    }
  });
}
