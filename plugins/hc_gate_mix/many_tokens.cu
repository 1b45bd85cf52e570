// The up projection with the gated mean of the streams for many tokens. A warp keeps the weight rows of all four streams
// of eight columns in registers; a block goes over stages of tokens, whose low ranks and normed streams pass through
// shared memory while the stage before is multiplied. A lane gets the gates of all streams of a column.
// HIDDEN: columns of a stream, whole vectors of 8; STREAMS: 4; RANK: whole chunks of 32; STAGE tokens, whole pairs of
// tiles of 8; bf16 only.
#include "q4e.cuh"

constexpr int WARPS = 8, THREADS = WARPS * WARP, TILE = 8;
constexpr int CHUNK = 32, CHUNKS = RANK / CHUNK;
constexpr int BLOCK_COLUMNS = WARPS * TILE, COLUMN_VECTORS = BLOCK_COLUMNS / 8;
constexpr int LOWRANK_STRIDE = RANK % 64 ? RANK : RANK + 32;  // rows that are read together share no bank
constexpr int NORMED_STRIDE = STREAMS * BLOCK_COLUMNS + 8;
constexpr int STAGE_ELEMENTS = STAGE * (LOWRANK_STRIDE + NORMED_STRIDE);
static_assert(STREAMS == 4 && RANK % CHUNK == 0 && HIDDEN % 8 == 0 && STAGE % (2 * TILE) == 0, "whole tiles");

__device__ __forceinline__ void copy_stage(bf16* stage, const bf16* lowrank, const bf16* normed, int64 first, int tokens) {
  constexpr int ROW_VECTORS = RANK / 8;
#pragma unroll
  for (int i = 0; i < ceil_div(STAGE * ROW_VECTORS, THREADS); ++i) {
    const int item = i * THREADS + threadIdx.x, token = item / ROW_VECTORS, column = item % ROW_VECTORS * 8;
    if (token < STAGE && first + token < tokens)
      copy_async_16(stage + token * LOWRANK_STRIDE + column, lowrank + (first + token) * RANK + column);
  }
  stage += STAGE * LOWRANK_STRIDE;
#pragma unroll
  for (int i = 0; i < ceil_div(STAGE * STREAMS * COLUMN_VECTORS, THREADS); ++i) {
    const int item = i * THREADS + threadIdx.x, row = item / COLUMN_VECTORS, token = row / STREAMS;
    const int place = item % COLUMN_VECTORS * 8, column = blockIdx.x * BLOCK_COLUMNS + place;
    if (token < STAGE && first + token < tokens && column < HIDDEN)
      copy_async_16(stage + token * NORMED_STRIDE + row % STREAMS * BLOCK_COLUMNS + place,
                    normed + (first * STREAMS + row) * HIDDEN + column);
  }
}

// Multiplies two tiles of tokens: sums[n][0] are streams 0 and 1 of the lane's column for tokens 2 * part and the next one
// of tile n, sums[n][1] streams 2 and 3.
__device__ __forceinline__ void multiply(const uint4 (&weights)[STREAMS][CHUNKS], const bf16* lowrank,
                                         float (&sums)[2][2][4]) {
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    uint4 x[2];
#pragma unroll
    for (int n = 0; n < 2; ++n)
      x[n] = *reinterpret_cast<const uint4*>(lowrank + n * TILE * LOWRANK_STRIDE + i * CHUNK);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const uint4 low = weights[2 * m][i], high = weights[2 * m + 1][i];
          const uint32 rows[4] = {half ? low.z : low.x, half ? high.z : high.x, half ? low.w : low.y,
                                  half ? high.w : high.y};
          const uint32 columns[2] = {half ? x[n].z : x[n].x, half ? x[n].w : x[n].y};
          mma_16x8x16(sums[n][m], rows, columns);
        }
  }
}

// The sum over the streams of sigmoid(gate) * value, gates rounded, values at `values` in shared memory. Half of it is the
// sum of values, the other half that of tanh(gate / 2) * value.
__device__ __forceinline__ float gated_sum(const float (&sums)[2][4], int token, const bf16* values) {
  float twice = 0.f;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const uint32 gates = pack_bf16(sums[m][token], sums[m][2 + token]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float value = to_float(values[(2 * m + i) * BLOCK_COLUMNS]);
      twice += value + tanh_approx(0.5f * (i ? high_bf16(gates) : low_bf16(gates))) * value;
    }
  }
  return 0.5f * twice;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
hc_gate_mix_many_tokens(const bf16* lowrank, const bf16* up_weight, const bf16* normed, bf16* mixed, int tokens) {
  DYNAMIC_SHARED(bf16, stages);  // two, each [STAGE, LOWRANK_STRIDE] and [STAGE, NORMED_STRIDE]
  const int warp = threadIdx.x / WARP, group = threadIdx.x % WARP / 4, part = threadIdx.x % 4;
  const int place = warp * TILE + group, column = blockIdx.x * BLOCK_COLUMNS + place;
  uint4 weights[STREAMS][CHUNKS];
#pragma unroll
  for (int stream = 0; stream < STREAMS; ++stream)
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
      weights[stream][i] = load_streaming(
          up_weight + (int64(stream) * HIDDEN + min(column, HIDDEN - 1)) * RANK + i * CHUNK + part * 8);
  wait_for_previous();
  start_next();
  const int64 hop = int64(gridDim.y) * STAGE;
  int64 first = int64(blockIdx.y) * STAGE;
  copy_stage(stages, lowrank, normed, first, tokens);
  commit_copies();
  for (int turn = 0; first < tokens; first += hop, turn ^= 1) {
    if (first + hop < tokens) copy_stage(stages + (turn ^ 1) * STAGE_ELEMENTS, lowrank, normed, first + hop, tokens);
    commit_copies();
    wait_copies<1>();
    __syncthreads();
    const bf16* stage = stages + turn * STAGE_ELEMENTS;
#pragma unroll 1
    for (int tile = 0; tile < STAGE; tile += 2 * TILE) {
      float sums[2][2][4] = {};
      multiply(weights, stage + (tile + group) * LOWRANK_STRIDE + part * 8, sums);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int token = tile + n * TILE + part * 2;
        const bf16* values = stage + STAGE * LOWRANK_STRIDE + token * NORMED_STRIDE + place;
        const float even = gated_sum(sums[n], 0, values), odd = gated_sum(sums[n], 1, values + NORMED_STRIDE);
        // A lane of an even column stores both columns of the even token, its neighbour those of the odd one.
        const bool is_odd = group % 2;
        const float own = is_odd ? odd : even, other = __shfl_xor_sync(FULL_MASK, is_odd ? even : odd, 4);
        const float low = is_odd ? other : own, high = is_odd ? own : other;
        const int64 row = first + token + is_odd;
        if (row < tokens && column < HIDDEN)
          *reinterpret_cast<uint32*>(mixed + row * HIDDEN + column - is_odd) = pack_bf16(low / STREAMS, high / STREAMS);
      }
    }
    __syncthreads();  // everyone has read the stage that is filled next
  }
}
