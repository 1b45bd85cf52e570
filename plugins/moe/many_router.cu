// Router logits of many tokens by tiles. EXPERTS: a multiple of 16 * ROUTED_ROW_TILES. HIDDEN, CHOICES; TOKEN_TILES,
// ROUTED_ROW_TILES, ROUTED_STAGES, MIN_BLOCKS: as in many_experts.cuh.
#include "moe/many_tile.cuh"
#include "moe/routing.cuh"

constexpr int TILE_TOKENS = 8 * TOKEN_TILES, BLOCK_ROWS = 16 * ROUTED_ROW_TILES * WARPS;
constexpr int BLOCKS = ceil_div(EXPERTS, BLOCK_ROWS);

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
many_router(const bf16* x, const bf16* router, float* logits, int first_token, int tokens) {
  DYNAMIC_SHARED(uint8, shared);
  __shared__ uint32 offsets[TILE_TOKENS];
  const int lane = threadIdx.x % WARP, first = blockIdx.x / BLOCKS * TILE_TOKENS;
  for (int i = threadIdx.x; i < TILE_TOKENS; i += THREADS)
    offsets[i] = min(first + i, tokens - 1) * uint32(HIDDEN * sizeof(bf16));
  const int row = blockIdx.x % BLOCKS * BLOCK_ROWS + threadIdx.x / WARP * (16 * ROUTED_ROW_TILES);
  const int low = row < EXPERTS ? row : 0;  // a warp behind the last expert repeats the first ones
  wait_for_previous();
  start_next();
  __syncthreads();
  using Product = TokenTile<Bf16, HIDDEN, 8, ROUTED_ROW_TILES, 16, TOKEN_TILES, ROUTED_STAGES>;
  const TokenRows from = {x + int64(first_token) * HIDDEN, offsets};
  Product::multiply(shared, {Weights{router, nullptr, nullptr}, low}, from, 1,
                    [&](const float(&sums)[ROUTED_ROW_TILES][TOKEN_TILES][4]) ALWAYS_INLINE {
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n)
#pragma unroll
      for (int right = 0; right < 2; ++right) {
        const int token = first + 8 * n + lane % 4 * 2 + right;
        if (token >= tokens || row >= EXPERTS) continue;
        float* to = logits + int64(token) * LOGITS_PITCH + row + lane / 4;
#pragma unroll
        for (int m = 0; m < ROUTED_ROW_TILES; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half) to[16 * m + 8 * half] = sums[m][n][2 * half + right];
      }
  });
}
