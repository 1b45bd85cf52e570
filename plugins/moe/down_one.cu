// down h of all experts of a step's one token, and their weighted sum. A block computes 16 elements of it: a warp for each
// routed expert, SHARED_WARPS for the shared one.
// HIDDEN; NORMALIZED: 1 if the weights sum to one; ROUTED_TILES, SHARED_TILES: 1; ROUTED_DEPTH, SHARED_DEPTH: of `RowTiles`; and the
// macros of groups.cuh.
#include "moe/groups.cuh"

constexpr int WARPS = CHOICES + SHARED_WARPS, THREADS = WARPS * WARP;

// What the tiles of warp `warp` make of `hidden`, times the scale of the matrix; waits for the kernel before this one.
template <typename Format, int COLUMNS, int D>
__device__ __forceinline__ void run(const Weights& experts, int expert, int part, int parts, const bf16* hidden,
                                    float* products) {
  using Tiles = RowTiles<Format, COLUMNS, 1, 16, 8, D>;
  const Weights weights = matrix<Format>(experts, expert, HIDDEN, COLUMNS);
  const int steps = ceil_div(Tiles::STEPS, parts), first = min(part * steps, Tiles::STEPS), lane = threadIdx.x % WARP;
  Tiles tiles(weights, blockIdx.x * 16, first, min(first + steps, Tiles::STEPS));
  const float scale = sum_scale<Format>(weights, 0);
  wait_for_previous();
  start_next();
  const bf16* const tokens[1] = {hidden};
  float sums[1][1][4];
  tiles.multiply(tokens, sums);
  if (lane % 4 == 0) {
    products[lane / 4] = sums[0][0][0] * scale;
    products[lane / 4 + 8] = sums[0][0][2] * scale;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
down_one(const void* values, const void* block_scales, const float* global_scales, const void* shared_values,
         const void* shared_block_scales, const float* shared_global_scales, const float* logits, const bf16* hidden,
         bf16* out) {
  __shared__ uint2 candidates[EXPERTS];
  __shared__ Choice chosen[CHOICES];
  __shared__ float weights[CHOICES], products[WARPS][16];
  const int warp = threadIdx.x / WARP;
  // The logits may be read before this kernel's turn: the one before it waited for them and let this one start behind that.
  if (warp == 0) {
    choose_experts(logits, candidates, chosen);
    weigh_choices<NORMALIZED>(logits, chosen, weights);
  }
  __syncthreads();
  const Weights routed = {values, block_scales, global_scales};
  const Weights shared = {shared_values, shared_block_scales, shared_global_scales};
  const bool is_shared = warp >= CHOICES;
  hidden += min(warp, CHOICES) * HIDDEN_PITCH;
  if constexpr (ALIKE) {
    run<ROUTED, INNER, ROUTED_DEPTH>(is_shared ? shared : routed, is_shared ? 0 : chosen[warp].expert,
                              is_shared ? warp - CHOICES : 0, is_shared ? SHARED_WARPS : 1, hidden, products[warp]);
  } else if (is_shared) {
    run<SHARED, SHARED_INNER, SHARED_DEPTH>(shared, 0, warp - CHOICES, SHARED_WARPS, hidden, products[warp]);
  } else {
    run<ROUTED, INNER, ROUTED_DEPTH>(routed, chosen[warp].expert, 0, 1, hidden, products[warp]);
  }
  __syncthreads();
  if (threadIdx.x >= 16) return;
  float of_shared = 0.f;
#pragma unroll
  for (int i = CHOICES; i < WARPS; ++i) of_shared += products[i][threadIdx.x];
  float sum = sigmoid(__ldcg(logits + EXPERTS)) * of_shared;
#pragma unroll
  for (int i = 0; i < CHOICES; ++i) sum += weights[i] * products[i][threadIdx.x];
  out[blockIdx.x * 16 + threadIdx.x] = from_float<bf16>(sum);
}
