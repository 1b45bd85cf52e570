// The up projection with the gated mean of the streams for many tokens. A warp keeps the weight rows of all four streams
// of eight columns in registers; a block goes over stages of tokens, whose low ranks and normed streams are copied to
// shared memory two stages ahead. A lane gets the gates of all streams of a column. While one half of the warps multiplies
// a stage, the other mixes: it does so one stage later, so that tensor cores are always busy.
// HIDDEN: columns of a stream, whole vectors of 8; STREAMS: 4; RANK: whole chunks of 32; bf16 only.
#include "q4e.cuh"

constexpr int WARPS = 8, THREADS = WARPS * WARP, TILE = 8;
constexpr int STAGE = 2 * TILE, STAGES = 4;  // tokens of one; those before, now and next, and the one that is filled
constexpr int CHUNK = 32, CHUNKS = RANK / CHUNK, LOWRANK_VECTORS = RANK / 8;
constexpr int BLOCK_COLUMNS = WARPS * TILE, COLUMN_VECTORS = BLOCK_COLUMNS / 8;
constexpr int NORMED_STRIDE = STREAMS * BLOCK_COLUMNS + 8;
constexpr int STAGE_ELEMENTS = STAGE * (RANK + NORMED_STRIDE);
static_assert(STREAMS == 4 && RANK % CHUNK == 0 && HIDDEN % 8 == 0, "whole tiles");

// Chunks of a token's low ranks by pairs change places in every other token: what is read together shares no bank.
__device__ __forceinline__ int chunk_of(int chunk, int token) { return RANK % 64 ? chunk : chunk ^ token % 2; }

__device__ __forceinline__ void copy_stage(bf16* stage, const bf16* lowrank, const bf16* normed, int64 first, int tokens) {
#pragma unroll
  for (int i = 0; i < ceil_div(STAGE * LOWRANK_VECTORS, THREADS); ++i) {
    const int item = i * THREADS + threadIdx.x, token = item / LOWRANK_VECTORS, vector = item % LOWRANK_VECTORS;
    const int to = token * RANK + chunk_of(vector / 4, token) * CHUNK + vector % 4 * 8;
    if (token < STAGE && first + token < tokens) copy_async_16(stage + to, lowrank + first * RANK + item * 8);
  }
  const int place = threadIdx.x % COLUMN_VECTORS * 8, column = blockIdx.x * BLOCK_COLUMNS + place;
  const int row = threadIdx.x / COLUMN_VECTORS;
  const bf16* from = normed + (first * STREAMS + row) * HIDDEN + column;
  bf16* to = stage + STAGE * RANK + row / STREAMS * NORMED_STRIDE + row % STREAMS * BLOCK_COLUMNS + place;
  constexpr int ROWS = THREADS / COLUMN_VECTORS, TOKENS = ROWS / STREAMS;  // of one round
#pragma unroll
  for (int i = 0; i < STAGE / TOKENS; ++i)
    if (first + i * TOKENS + row / STREAMS < tokens && column < HIDDEN)
      copy_async_16(to + i * TOKENS * NORMED_STRIDE, from + i * ROWS * HIDDEN);
}

// Multiplies a stage: sums[n][0] are streams 0 and 1 of the lane's column for tokens 2 * part and the next one of tile n,
// sums[n][1] streams 2 and 3.
__device__ __forceinline__ void multiply(const uint4 (&weights)[STREAMS][CHUNKS], const bf16* stage,
                                         float (&sums)[2][2][4]) {
  const int group = threadIdx.x % WARP / 4, part = threadIdx.x % 4;
  float parts[2][2][2][4] = {};  // eight chains of dependent sums
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    uint4 x[2];
#pragma unroll
    for (int n = 0; n < 2; ++n)
      x[n] = *reinterpret_cast<const uint4*>(stage + (n * TILE + group) * RANK + chunk_of(i, group) * CHUNK + part * 8);
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
          mma_16x8x16(parts[half][n][m], rows, columns);
        }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][m][i] = parts[0][n][m][i] + parts[1][n][m][i];
}

// The sum over the streams of sigmoid(gate) * value, gates rounded, values at `values` in shared memory. Half of it is the
// sum of values, the other half that of tanh(gate / 2) * value.
__device__ __forceinline__ float gated_sum(const float (&sums)[2][4], int token, const bf16* values) {
  float twice = 0.f;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const uint32 halves = multiply_bf16(pack_bf16(sums[m][token], sums[m][2 + token]), 0x3f003f00u);  // of the gates
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float value = to_float(values[(2 * m + i) * BLOCK_COLUMNS]);
      twice += value + tanh_approx(i ? high_bf16(halves) : low_bf16(halves)) * value;
    }
  }
  return 0.5f * twice;
}

// Mixes a stage that starts with token `first` and stores it.
__device__ __forceinline__ void mix_stage(const float (&sums)[2][2][4], const bf16* stage, bf16* mixed, int64 first,
                                          int tokens) {
  const int group = threadIdx.x % WARP / 4, part = threadIdx.x % 4;
  const int place = threadIdx.x / WARP * TILE + group, column = blockIdx.x * BLOCK_COLUMNS + place;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int token = n * TILE + part * 2;
    const bf16* values = stage + STAGE * RANK + token * NORMED_STRIDE + place;
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

extern "C" __global__ void __launch_bounds__(THREADS, 1)
hc_gate_mix_many_tokens(const bf16* lowrank, const bf16* up_weight, const bf16* normed, bf16* mixed, int tokens) {
  DYNAMIC_SHARED(bf16, stages);  // [STAGES], each [STAGE, RANK] and [STAGE, NORMED_STRIDE]
  const int warp = threadIdx.x / WARP, group = threadIdx.x % WARP / 4, part = threadIdx.x % 4;
  const int column = min(int(blockIdx.x) * BLOCK_COLUMNS + warp * TILE + group, HIDDEN - 1);
  uint4 weights[STREAMS][CHUNKS];
#pragma unroll
  for (int stream = 0; stream < STREAMS; ++stream)
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
      weights[stream][i] = load_streaming(up_weight + (int64(stream) * HIDDEN + column) * RANK + i * CHUNK + part * 8);
  wait_for_previous();
  start_next();
  const int64 hop = int64(gridDim.y) * STAGE;
  int64 first = int64(blockIdx.y) * STAGE;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    if (first + s * hop < tokens) copy_stage(stages + s * STAGE_ELEMENTS, lowrank, normed, first + s * hop, tokens);
    commit_copies();
  }
  const bool is_late = warp >= WARPS / 2;  // a multiprocessor's scheduler has one warp of each half
  float sums[2][2][4];
  int now = 0;
  for (; first < tokens; first += hop, now = (now + 1) % STAGES) {
    wait_copies<1>();
    __syncthreads();  // also: everyone is done with the stage that is filled next
    if (first + 2 * hop < tokens)
      copy_stage(stages + (now + 2) % STAGES * STAGE_ELEMENTS, lowrank, normed, first + 2 * hop, tokens);
    commit_copies();
    const bf16* stage = stages + now * STAGE_ELEMENTS;
    if (is_late && first >= hop)
      mix_stage(sums, stages + (now + STAGES - 1) % STAGES * STAGE_ELEMENTS, mixed, first - hop, tokens);
    multiply(weights, stage, sums);
    if (!is_late) mix_stage(sums, stage, mixed, first, tokens);
  }
  if (is_late && first >= hop)
    mix_stage(sums, stages + (now + STAGES - 1) % STAGES * STAGE_ELEMENTS, mixed, first - hop, tokens);
}
