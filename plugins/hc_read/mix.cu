// A read's second kernel for up to eight tokens: adds up what the streams' blocks projected, norms, and mixes. Every
// block makes all low ranks for itself. Macros: those of gate_mix.cuh.
#include "hc_gate_mix/gate_mix.cuh"

constexpr int PADDED_ROWS = ceil_div(RANK + STREAMS, 16) * 16;
constexpr int ROW_VECTORS = RANK / 4;  // of the low ranks' products of a token

// A row's parts from the streams to its product; `scales` are the norm's factors.
__device__ __forceinline__ float product(const float (&parts)[STREAMS], const float* scales) {
  float sum = 0.f;
#pragma unroll
  for (int stream = 0; stream < STREAMS; ++stream) sum += parts[stream] * scales[stream];
  return sum / STREAMS;
}

// Copies what the streams' blocks projected; each thread copies what it is going to add up.
__device__ __forceinline__ void copy_parts(float4* parts, const float* partial, int tokens) {
  const int vectors = tokens * ROW_VECTORS;
  for (int i = threadIdx.x; i < vectors; i += THREADS) {
    const float* from = partial + i / ROW_VECTORS * PADDED_ROWS + i % ROW_VECTORS * 4;
#pragma unroll
    for (int stream = 0; stream < STREAMS; ++stream)
      copy_async_16(parts + stream * vectors + i, from + stream * tokens * PADDED_ROWS);
  }
  commit_copies();
}

// The low ranks of all tokens, `[tokens, LOWRANK_STRIDE]`.
__device__ __forceinline__ void make_lowrank(bf16* lowrank, const float4* parts, const float* scales, int tokens) {
  const int vectors = tokens * ROW_VECTORS;
  for (int i = threadIdx.x; i < vectors; i += THREADS) {
    const int token = i / ROW_VECTORS;
    float sums[4][STREAMS], values[4];
#pragma unroll
    for (int stream = 0; stream < STREAMS; ++stream) {
      const float4 part = parts[stream * vectors + i];
      sums[0][stream] = part.x, sums[1][stream] = part.y, sums[2][stream] = part.z, sums[3][stream] = part.w;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) values[j] = silu(product(sums[j], scales + token * STREAMS));
    *reinterpret_cast<uint2*>(lowrank + token * LOWRANK_STRIDE + i % ROW_VECTORS * 4) =
        make_uint2(pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3]));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
hc_read_mix(const float* partial, const float* squares, const float* gain, const bf16* up_weight, const bf16* combined,
            bf16* mixed, bf16* next_inject, float eps, int tokens) {
  DYNAMIC_SHARED(float4, parts);                                                      // [STREAMS, tokens, ROW_VECTORS]
  bf16* lowrank = reinterpret_cast<bf16*>(parts + STREAMS * tokens * ROW_VECTORS);    // [TILE_TOKENS, LOWRANK_STRIDE]
  __shared__ float scales[TILE_TOKENS * STREAMS];
  GateWeights weights;
  load_weights(weights, up_weight);
  float2 gains = make_float2(0.f, 0.f);
  if (lane_column() < HIDDEN) gains = *reinterpret_cast<const float2*>(gain + lane_stream() * HIDDEN + lane_column());
  wait_for_previous();
  start_next();
  copy_parts(parts, partial, tokens);
  Streams streams = load_streams(combined, 0, tokens);
  if (threadIdx.x < tokens * STREAMS) scales[threadIdx.x] = rsqrtf(__ldcg(squares + threadIdx.x) / HIDDEN + eps);
  wait_copies<0>();
  __syncthreads();
  make_lowrank(lowrank, parts, scales, tokens);
#pragma unroll
  for (int i = 0; i < 2; ++i) {  // token `2 * part + i`; behind the last one is anything, times zero or not stored
    const float scale = scales[(threadIdx.x % 4 * 2 + i) * STREAMS + lane_stream()];
    const uint32 pair = streams.pairs[i];
    streams.pairs[i] = pack_bf16(low_bf16(pair) * scale * gains.x, high_bf16(pair) * scale * gains.y);
  }
  for (int token = blockIdx.x; token < tokens; token += gridDim.x) {
    if (threadIdx.x >= STREAMS) break;
    float row[STREAMS];
#pragma unroll
    for (int stream = 0; stream < STREAMS; ++stream)
      row[stream] = __ldcg(partial + (stream * tokens + token) * PADDED_ROWS + RANK + threadIdx.x);
    next_inject[token * STREAMS + threadIdx.x] =
        from_float<bf16>(2.f * sigmoid(product(row, scales + token * STREAMS)));
  }
  __syncthreads();
  mix_tile(weights, lowrank, streams, mixed, 0, tokens);
}
