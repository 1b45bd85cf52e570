// A read's second kernel for up to eight tokens: adds up what the streams' blocks projected, and mixes. Every block
// makes all low ranks for itself. Macros: those of gate_mix.cuh.
#include "hc_gate_mix/gate_mix.cuh"

constexpr int BATCH = STREAMS > 4 ? 1 : 2;  // values that a thread loads at once
constexpr int PADDED_ROWS = ceil_div(RANK + STREAMS, 16) * 16;

extern "C" __global__ void __launch_bounds__(THREADS)
hc_read_mix(const float* partial, const bf16* up_weight, const bf16* normed, bf16* mixed, bf16* inject, int tokens) {
  DYNAMIC_SHARED(bf16, lowrank);  // [TILE_TOKENS, LOWRANK_STRIDE]
  GateWeights weights;
  load_weights(weights, up_weight);
  wait_for_previous();
  start_next();
  const Streams streams = load_streams(normed, 0, tokens);
  const int of_stream = tokens * PADDED_ROWS;
  for (int start = 0; start < tokens * (RANK / 4); start += BATCH * THREADS) {
    float4 parts[BATCH][STREAMS];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int item = start + i * THREADS + threadIdx.x, token = item / (RANK / 4), column = item % (RANK / 4) * 4;
      if (token >= tokens) break;
#pragma unroll
      for (int stream = 0; stream < STREAMS; ++stream)
        parts[i][stream] =
            __ldcg(reinterpret_cast<const float4*>(partial + stream * of_stream + token * PADDED_ROWS + column));
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int item = start + i * THREADS + threadIdx.x, token = item / (RANK / 4), column = item % (RANK / 4) * 4;
      if (token >= tokens) break;
      float4 sum = parts[i][0];
#pragma unroll
      for (int stream = 1; stream < STREAMS; ++stream) {
        const float4 part = parts[i][stream];
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
      *reinterpret_cast<uint2*>(lowrank + token * LOWRANK_STRIDE + column) =
          make_uint2(pack_bf16(silu(sum.x / STREAMS), silu(sum.y / STREAMS)),
                     pack_bf16(silu(sum.z / STREAMS), silu(sum.w / STREAMS)));
    }
  }
  for (int token = blockIdx.x; token < tokens; token += gridDim.x) {
    if (threadIdx.x >= STREAMS) break;
    float sum = 0.f;
    for (int stream = 0; stream < STREAMS; ++stream)
      sum += __ldcg(partial + stream * of_stream + token * PADDED_ROWS + RANK + threadIdx.x);
    inject[token * STREAMS + threadIdx.x] = from_float<bf16>(2.f * sigmoid(sum / STREAMS));
  }
  __syncthreads();
  mix_tile(weights, lowrank, streams, mixed, 0, tokens);
}
