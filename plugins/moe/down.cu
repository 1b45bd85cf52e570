// down h of the routed experts and of the shared one, a row of `outputs` for each entry. A warp computes 16 *
// ROUTED_TILES rows for a group of tokens. HIDDEN; WARPS; ROUTED_TILES, ROUTED_AHEAD, SHARED_TILES, SHARED_AHEAD: of
// `RowTiles`; and the macros of groups.cuh.
#include "moe/groups.cuh"

constexpr int THREADS = WARPS * WARP;

// What `route` wrote may be read before this kernel's turn: the one before it waited for `route` and let this one start
// behind that.
template <typename Format, int COLUMNS, int T, int AHEAD>
__device__ __forceinline__ void run(const Weights& experts, bool is_shared, int block, const Lists& lists,
                                    const bf16* hidden, float* outputs) {
  constexpr int BLOCKS = HIDDEN / (16 * T * WARPS);
  const int index = block / BLOCKS, row = (block % BLOCKS * WARPS + threadIdx.x / WARP) * (16 * T);
  const int lane = threadIdx.x % WARP;
  const Group group = lists.group(is_shared, index);
  if (group.count == 0) {
    wait_for_previous();
    return;
  }
  const Weights weights = matrix<Format>(experts, group.expert, HIDDEN, COLUMNS);
  RowTiles<Format, COLUMNS, T, 16, COLUMNS / Format::STEP, AHEAD> tiles(weights, row + lane / 4, row + lane / 4 + 8, 0);
  const float scale = sum_scale<Format>(weights, 0);
  const bf16* tokens[N];
#pragma unroll
  for (int n = 0; n < N; ++n) tokens[n] = hidden + int64(group.entry(8 * n + lane / 4)) * HIDDEN_PITCH;
  wait_for_previous();
  start_next();
  float sums[T][N][4];
  tiles.template multiply<true, TURNS>(tokens, sums);
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int right = 0; right < 2; ++right) {
      int column = 8 * n + lane % 4 * 2 + right;
      if (column >= group.count) continue;
      float* to = outputs + int64(group.entry(column)) * HIDDEN + row + lane / 4;
#pragma unroll
      for (int tile = 0; tile < T; ++tile) {
        to[16 * tile] = sums[tile][n][right] * scale;
        to[16 * tile + 8] = sums[tile][n][2 + right] * scale;
      }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
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
    run<ROUTED, INNER, ROUTED_TILES, ROUTED_AHEAD>(select(is_shared, shared, routed), is_shared, block, lists, hidden,
                                                   outputs);
  } else if (is_shared) {
    run<SHARED, SHARED_INNER, SHARED_TILES, SHARED_AHEAD>(shared, true, block, lists, hidden, outputs);
  } else {
    run<ROUTED, INNER, ROUTED_TILES, ROUTED_AHEAD>(routed, false, block, lists, hidden, outputs);
  }
}
