// down h of the routed experts and of the shared one, a row of `outputs` for each entry. A warp computes 16 * UNIT_TILES rows
// for a group of tokens. HIDDEN; WARPS; UNIT_TILES, MOST_SLOTS, ROUTED_CHUNK, SHARED_CHUNK: of `Stages`; and the macros of
// groups.cuh.
#include "moe/groups.cuh"

constexpr int THREADS = WARPS * WARP;

// What `route` wrote may be read before this kernel's turn: the one before it waited for `route` and let this one start
// behind that.
template <typename Format, int COLUMNS, int CHUNK>
__device__ __forceinline__ void run(const Weights& experts, bool is_shared, int block, const Lists& lists,
                                    const bf16* hidden, float* outputs) {
  using Tiles = Stages<Format, COLUMNS, COLUMNS, CHUNK, UNIT_TILES, MOST_SLOTS, WARP>;
  constexpr int BLOCKS = HIDDEN / (16 * UNIT_TILES * WARPS);
  DYNAMIC_SHARED(uint8, slots);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int row = (block % BLOCKS * WARPS + warp) * (16 * UNIT_TILES);
  const Group group = lists.group(is_shared, block / BLOCKS);
  if (group.count == 0) {
    wait_for_previous();
    return;
  }
  const Weights weights = matrix<Format>(experts, group.expert, HIDDEN, COLUMNS);
  const Tiles tiles = {slots + warp * Tiles::BYTES, weights, row, row + 8 * UNIT_TILES, 0, lane};
  tiles.start();
  const float scale = sum_scale<Format>(weights, 0);
  const bf16* tokens[N];
#pragma unroll
  for (int n = 0; n < N; ++n) tokens[n] = hidden + int64(group.entry(8 * n + lane / 4)) * HIDDEN_PITCH;
  wait_for_previous();
  start_next();
  float sums[UNIT_TILES][N][4];
  tiles.template multiply<true, CHUNK / Format::STEP>(tokens, 0, sums);
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int right = 0; right < 2; ++right) {
      int column = 8 * n + lane % 4 * 2 + right;
      if (column >= group.count) continue;
      float* to = outputs + int64(group.entry(column)) * HIDDEN + row + lane / 4;
#pragma unroll
      for (int tile = 0; tile < UNIT_TILES; ++tile) {
        to[8 * tile] = sums[tile][n][right] * scale;
        to[8 * (UNIT_TILES + tile)] = sums[tile][n][2 + right] * scale;
      }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
down(const void* values, const void* block_scales, const float* global_scales, const void* shared_values,
     const void* shared_block_scales, const float* shared_global_scales, const bf16* hidden, const int* order,
     const int4* items, const int* num_items, const int* query_start_loc, const int* num_seqs, float* outputs,
     int first_token, int tokens, int shared_blocks) {
  const Weights routed = {values, block_scales, global_scales};
  const Weights shared = {shared_values, shared_block_scales, shared_global_scales};
  const Lists lists = {order, items, num_items, query_start_loc, num_seqs, first_token, tokens};
  const bool is_shared = int(blockIdx.x) < shared_blocks;
  const int block = is_shared ? blockIdx.x : blockIdx.x - shared_blocks;
  if constexpr (ALIKE) {
    run<ROUTED, INNER, ROUTED_CHUNK>(select(is_shared, shared, routed), is_shared, block, lists, hidden, outputs);
  } else if (is_shared) {
    run<SHARED, SHARED_INNER, SHARED_CHUNK>(shared, true, block, lists, hidden, outputs);
  } else {
    run<ROUTED, INNER, ROUTED_CHUNK>(routed, false, block, lists, hidden, outputs);
  }
}
