// silu(gate x) * (up x) of the routed experts and of the shared one, for tiles of many tokens: a 16-row tile is 8 gate rows
// and the 8 up rows beside them. MIN_BLOCKS; and the macros of many_experts.cuh.
#include "moe/many_experts.cuh"

constexpr int BLOCK_ROWS = 8 * ROW_TILES * WARPS;  // of hidden elements

// What a block works on, in shared memory: it would take registers from the product.
struct Task {
  Tile tile;
  uint32 offsets[TILE_TOKENS];  // of the tokens in x, in bytes
};

// Rounds the hidden elements and writes them in the order that the product with `down` wants.
template <typename Format, int N>
__device__ __forceinline__ void store_hidden(const float (&sums)[ROW_TILES][N][4], float gate_scale, float up_scale,
                                             const Tile& tile, bf16* to, uint8* shared) {
  constexpr int PITCH = BLOCK_ROWS + 8, CHUNKS = BLOCK_ROWS / 8;
  bf16* staged = reinterpret_cast<bf16*>(shared);
  const int lane = threadIdx.x % WARP, place = TileFormat<Format>::arranged(lane / 4);
  __syncthreads();
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int right = 0; right < 2; ++right) {
        const float value = silu(sums[m][n][right] * gate_scale) * (sums[m][n][2 + right] * up_scale);
        const int token = 8 * n + lane % 4 * 2 + right, group = threadIdx.x / WARP * ROW_TILES + m;
        staged[token * PITCH + 8 * group + place] = from_float<bf16>(value);
      }
  __syncthreads();
  for (int i = threadIdx.x; i < tile.count * CHUNKS; i += THREADS) {
    const int token = i / CHUNKS, chunk = i % CHUNKS;
    *reinterpret_cast<uint4*>(to + int64(tile.first + token) * HIDDEN_PITCH + 8 * chunk) =
        *reinterpret_cast<const uint4*>(staged + token * PITCH + 8 * chunk);
  }
}

template <typename Format, int ROWS, int STAGES>
__device__ __forceinline__ void run(const Weights& experts, bool is_shared, int block, const Lists& lists, const bf16* x,
                                    const int* token_of_position, bf16* hidden) {
  DYNAMIC_SHARED(uint8, shared);
  __shared__ Task task;
  constexpr int BLOCKS = ROWS / BLOCK_ROWS;
  static_assert(ROWS % BLOCK_ROWS == 0, "whole blocks of rows");
  const Tile tile = lists.tile(is_shared, block / BLOCKS);
  if (tile.count == 0) return;
  for (int i = threadIdx.x; i < TILE_TOKENS; i += THREADS) {
    const int position = tile.first + (i < tile.count ? i : 0);
    const int token = is_shared ? position - lists.tokens * CHOICES : token_of_position[position];
    task.offsets[i] = token * uint32(HIDDEN * sizeof(bf16));
  }
  if (threadIdx.x == 0) task.tile = tile;
  __syncthreads();
  with_token_tiles<TOKEN_TILES>(tile.count, [&](auto tiles) {
    constexpr int N = decltype(tiles)::value;
    using Product = TokenTile<Format, HIDDEN, ROWS, ROW_TILES, 8, N, STAGES>;
    const int first_row = block % BLOCKS * BLOCK_ROWS;
    const typename Product::Rows rows(matrix<Format>(experts, 2 * tile.expert, ROWS, HIDDEN),
                                      first_row + threadIdx.x / WARP * (8 * ROW_TILES));
    Product::multiply(shared, rows, {x, task.offsets}, 1, [&](const float(&sums)[ROW_TILES][N][4]) {
      const Weights weights = matrix<Format>(experts, 2 * task.tile.expert, ROWS, HIDDEN);
      store_hidden<Format, N>(sums, sum_scale<Format>(weights, 0), sum_scale<Format>(weights, 1), task.tile,
                              hidden + first_row, shared);
    });
  });
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
many_gate_up(const bf16* x, const bf16* arranged_x, const void* values, const void* block_scales,
             const float* global_scales, const void* shared_values, const void* shared_block_scales,
             const float* shared_global_scales, const int* token_of_position, const int4* tiles, const int* num_tiles,
             const int* query_start_loc, const int* num_seqs, bf16* hidden, int first_token, int tokens,
             int shared_blocks) {
  const Weights routed = {values, block_scales, global_scales};
  const Weights shared = {shared_values, shared_block_scales, shared_global_scales};
  const Lists lists = {tiles, num_tiles, query_start_loc, num_seqs, first_token, tokens};
  const bool is_shared = int(blockIdx.x) < shared_blocks;
  const int block = is_shared ? blockIdx.x : blockIdx.x - shared_blocks;
  x += int64(first_token) * HIDDEN;
  wait_for_previous();
  start_next();
  const bf16* routed_x = is_same<ROUTED, Bf16> ? x : arranged_x;
  const bf16* shared_x = is_same<SHARED, Bf16> ? x : arranged_x;
  if constexpr (ALIKE) {
    run<ROUTED, INNER, ROUTED_STAGES>(select(is_shared, shared, routed), is_shared, block, lists, routed_x, token_of_position, hidden);
  } else if (is_shared) {
    run<SHARED, SHARED_INNER, SHARED_STAGES>(shared, true, block, lists, shared_x, token_of_position, hidden);
  } else {
    run<ROUTED, INNER, ROUTED_STAGES>(routed, false, block, lists, routed_x, token_of_position, hidden);
  }
}
