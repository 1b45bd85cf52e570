// The up projection and the gated mean behind it, by tensor cores. A warp keeps 16 rows of the weight in registers, all
// streams of 16 / STREAMS columns, loaded before there are activations; the low ranks pass through shared memory.
// HIDDEN: columns of a stream; STREAMS: 1, 2, 4 or 8; RANK: whole chunks of 32; bf16 only.
#pragma once
#include "q4e.cuh"

constexpr int WARPS = 5, THREADS = WARPS * WARP;
constexpr int CHUNK = 32, CHUNKS = RANK / CHUNK, TILE_TOKENS = 8;
constexpr int WARP_COLUMNS = 16 / STREAMS, BLOCK_COLUMNS = WARPS * WARP_COLUMNS;
constexpr int LOWRANK_STRIDE = RANK % 64 ? RANK : RANK + 32;  // rows that are read together share no bank
static_assert(RANK % CHUNK == 0 && HIDDEN % 2 == 0 && 8 % STREAMS == 0, "whole tiles");

struct GateWeights {
  uint4 low[CHUNKS], high[CHUNKS];  // of two adjacent columns of a stream
};

// Lane `4 * group + part`: the stream, and the first of two columns, whose gates its warp's tiles give to it.
__device__ __forceinline__ int lane_stream() { return threadIdx.x % WARP / 4 % STREAMS; }
__device__ __forceinline__ int lane_column() {
  return blockIdx.x * BLOCK_COLUMNS + threadIdx.x / WARP * WARP_COLUMNS + threadIdx.x % WARP / 4 / STREAMS * 2;
}

__device__ __forceinline__ void load_weights(GateWeights& weights, const bf16* up_weight) {
  const int column = lane_column();
  const bf16* from = up_weight + (int64(lane_stream()) * HIDDEN + column) * RANK + threadIdx.x % 4 * 8;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    weights.low[i] = column < HIDDEN ? load_streaming(from + i * CHUNK) : make_uint4(0, 0, 0, 0);
    weights.high[i] = column < HIDDEN ? load_streaming(from + RANK + i * CHUNK) : make_uint4(0, 0, 0, 0);
  }
}

// The normed values of the lane's two columns for its two tokens, `2 * part` and the next one behind `first_token`.
struct Streams {
  uint32 pairs[2];
};
__device__ __forceinline__ Streams load_streams(const bf16* normed, int64 first_token, int tokens) {
  Streams streams;
  const int column = lane_column();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64 token = first_token + threadIdx.x % 4 * 2 + i;
    const bf16* from = normed + (token * STREAMS + lane_stream()) * HIDDEN + column;
    streams.pairs[i] = token < tokens && column < HIDDEN ? __ldcg(reinterpret_cast<const uint32*>(from)) : 0;
  }
  return streams;
}

// Mixes eight tokens from `first_token` on, whose low ranks lie in `lowrank` `[8, LOWRANK_STRIDE]` of shared memory.
__device__ __forceinline__ void mix_tile(const GateWeights& weights, const bf16* lowrank, const Streams& streams,
                                         bf16* mixed, int64 first_token, int tokens) {
  const int group = threadIdx.x % WARP / 4, part = threadIdx.x % 4;
  float sums[4][4] = {};  // four chains of dependent sums
  // Lanes without a token repeat the first one: what they give to the product is not stored.
  lowrank += (first_token + group < tokens ? group : 0) * LOWRANK_STRIDE + part * 8;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const uint4 x = *reinterpret_cast<const uint4*>(lowrank + i * CHUNK);
    const uint4 low = weights.low[i], high = weights.high[i];
    const uint32 first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
    const uint32 first_x[2] = {x.x, x.y}, second_x[2] = {x.z, x.w};
    mma_16x8x16(sums[i % 2 * 2], first, first_x);
    mma_16x8x16(sums[i % 2 * 2 + 1], second, second_x);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[0][i] += sums[1][i] + (sums[2][i] + sums[3][i]);
#pragma unroll
  for (int i = 0; i < 2; ++i) {  // token `2 * part + i`
    float low = sigmoid(round_to<bf16>(sums[0][i])) * low_bf16(streams.pairs[i]);
    float high = sigmoid(round_to<bf16>(sums[0][2 + i])) * high_bf16(streams.pairs[i]);
#pragma unroll
    for (int stream = 1; stream < STREAMS; stream *= 2) {
      low += __shfl_xor_sync(FULL_MASK, low, stream * 4);
      high += __shfl_xor_sync(FULL_MASK, high, stream * 4);
    }
    const int64 token = first_token + part * 2 + i;
    if (group % STREAMS == 0 && token < tokens && lane_column() < HIDDEN)
      *reinterpret_cast<uint32*>(mixed + token * HIDDEN + lane_column()) = pack_bf16(low / STREAMS, high / STREAMS);
  }
}
