// The up projection with the gated mean of the streams. Macros: those of gate_mix.cuh, and STAGE: how many tokens' low
// ranks are in shared memory at a time.
#include "hc_gate_mix/gate_mix.cuh"

constexpr int TILES = STAGE / TILE_TOKENS;

extern "C" __global__ void __launch_bounds__(THREADS)
hc_gate_mix(const bf16* lowrank, const bf16* up_weight, const bf16* normed, bf16* mixed, int tokens) {
  DYNAMIC_SHARED(bf16, stage);  // [STAGE, LOWRANK_STRIDE]
  GateWeights weights;
  load_weights(weights, up_weight);
  wait_for_previous();
  start_next();
  for (int64 start = int64(blockIdx.y) * STAGE; start < tokens; start += int64(gridDim.y) * STAGE) {
    Streams streams[TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i) streams[i] = load_streams(normed, start + i * TILE_TOKENS, tokens);
    __syncthreads();  // everyone has read the stage before
    for (int i = threadIdx.x; i < STAGE * (RANK / 8); i += THREADS) {
      const int token = i / (RANK / 8), column = i % (RANK / 8) * 8;
      if (start + token < tokens)
        copy_async_16(stage + token * LOWRANK_STRIDE + column, lowrank + (start + token) * RANK + column);
    }
    commit_copies();
    wait_copies<0>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      if (start + i * TILE_TOKENS >= tokens) break;
      mix_tile(weights, stage + i * TILE_TOKENS * LOWRANK_STRIDE, streams[i], mixed, start + i * TILE_TOKENS, tokens);
    }
  }
}
