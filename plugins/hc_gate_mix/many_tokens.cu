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
constexpr int NORMED_STRIDE = STREAMS * BLOCK_COLUMNS;
constexpr int STAGE_ELEMENTS = STAGE * (RANK + NORMED_STRIDE + 2 * STREAMS);  // low ranks, streams, scales (float)
static_assert(STREAMS == 4 && RANK % CHUNK == 0 && HIDDEN % 8 == 0, "whole tiles");

// Chunks of a token's low ranks by pairs change places in every other token: what is read together shares no bank.
__device__ __forceinline__ int chunk_of(int chunk, int token) { return RANK % 64 ? chunk : chunk ^ token % 2; }

__device__ __forceinline__ float* scales_of(bf16* stage) {
  return reinterpret_cast<float*>(stage + STAGE * (RANK + NORMED_STRIDE));
}

// Where the vector `v` of a token's stream is: lanes that read different tokens together share no bank.
__device__ __forceinline__ int vector_of(int v, int token) { return v ^ token / 2 % 4 * 2; }

// How a thread copies its part of a stage.
struct Copies {
  static constexpr int LOWRANK_ITEMS = ceil_div(STAGE * LOWRANK_VECTORS, THREADS);
  static constexpr int ROWS = THREADS / COLUMN_VECTORS, TOKENS = ROWS / STREAMS;  // of one round over the normed streams
  const bf16 *lowrank, *normed;  // of the first token
  const float* scales;
  int lowrank_to[LOWRANK_ITEMS], normed_to, token;
  bool has_columns;

  __device__ __forceinline__ Copies(const bf16* lowrank_rows, const bf16* normed_rows, const float* scale_rows)
      : scales(scale_rows) {
#pragma unroll
    for (int i = 0; i < LOWRANK_ITEMS; ++i) {
      const int item = i * THREADS + threadIdx.x, row = item / LOWRANK_VECTORS, vector = item % LOWRANK_VECTORS;
      lowrank_to[i] = row * RANK + chunk_of(vector / 4, row) * CHUNK + vector % 4 * 8;
    }
    const int place = threadIdx.x % COLUMN_VECTORS * 8, column = blockIdx.x * BLOCK_COLUMNS + place;
    const int row = threadIdx.x / COLUMN_VECTORS;
    token = row / STREAMS, has_columns = column < HIDDEN;
    normed_to = STAGE * RANK + token * NORMED_STRIDE + row % STREAMS * BLOCK_COLUMNS +
                vector_of(threadIdx.x % COLUMN_VECTORS, token) * 8;
    lowrank = lowrank_rows + threadIdx.x * 8, normed = normed_rows + int64(row) * HIDDEN + column;
  }
  template <bool IS_SCALED>
  __device__ __forceinline__ void copy(bf16* stage, int64 first, int tokens) const {
    const int left = tokens - first < STAGE ? int(tokens - first) : STAGE;
    const bf16* from = lowrank + first * RANK;
#pragma unroll
    for (int i = 0; i < LOWRANK_ITEMS; ++i)
      if (i * THREADS + int(threadIdx.x) < left * LOWRANK_VECTORS)
        copy_async_16(stage + lowrank_to[i], from + i * THREADS * 8);
    from = normed + first * (STREAMS * HIDDEN);
#pragma unroll
    for (int i = 0; i < STAGE / TOKENS; ++i)
      if (has_columns && i * TOKENS + token < left)
        copy_async_16(stage + normed_to + i * TOKENS * NORMED_STRIDE, from + i * ROWS * HIDDEN);
    if (IS_SCALED && int(threadIdx.x) < left)
      copy_async_16(scales_of(stage) + threadIdx.x * STREAMS, scales + (first + threadIdx.x) * STREAMS);
  }
};

// Multiplies a stage: sums[n][0] are streams 0 and 1 of the lane's column for tokens 2 * part and the next one of tile n,
// sums[n][1] streams 2 and 3.
__device__ __forceinline__ void multiply(const uint4 (&weights)[STREAMS][CHUNKS], const bf16* stage,
                                         float (&sums)[2][2][4]) {
  const int group = threadIdx.x % WARP / 4, part = threadIdx.x % 4;
  const int flip = RANK % 64 ? 0 : group % 2 * CHUNK;  // as `chunk_of` for even and odd chunks
  const bf16* row = stage + group * RANK + part * 8;
  const bf16 *even = row + flip, *odd = row - flip;
  float parts[2][2][2][4] = {};  // eight chains of dependent sums
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    uint4 x[2];
#pragma unroll
    for (int n = 0; n < 2; ++n)
      x[n] = *reinterpret_cast<const uint4*>((i % 2 ? odd : even) + n * TILE * RANK + i * CHUNK);
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

// The sum over the streams of sigmoid(gate) * value, gates rounded, values at `values` in shared memory, with IS_SCALED
// times `scales` and rounded again. Half of it is the sum of values, the other half that of tanh(gate / 2) * value.
template <bool IS_SCALED>
__device__ __forceinline__ float gated_sum(const float (&sums)[2][4], int token, const bf16* values,
                                           const float (&scales)[STREAMS]) {
  float twice = 0.f;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const uint32 halves = multiply_bf16(pack_bf16(sums[m][token], sums[m][2 + token]), 0x3f003f00u);  // of the gates
    float low = to_float(values[2 * m * BLOCK_COLUMNS]), high = to_float(values[(2 * m + 1) * BLOCK_COLUMNS]);
    if (IS_SCALED) {
      const uint32 pair = pack_bf16(low * scales[2 * m], high * scales[2 * m + 1]);
      low = low_bf16(pair), high = high_bf16(pair);
    }
    twice += low + tanh_approx(low_bf16(halves)) * low;
    twice += high + tanh_approx(high_bf16(halves)) * high;
  }
  return 0.5f * twice;
}

// Mixes a stage that starts with token `first` and stores it. `gains` are the lane's column's of all streams.
template <bool IS_SCALED>
__device__ __forceinline__ void mix_stage(const float (&sums)[2][2][4], bf16* stage, const float* gains, bf16* mixed,
                                          int64 first, int tokens) {
  const int group = threadIdx.x % WARP / 4, part = threadIdx.x % 4;
  const int place = threadIdx.x / WARP * TILE + group, column = blockIdx.x * BLOCK_COLUMNS + place;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int token = n * TILE + part * 2;
    const bf16* values = stage + STAGE * RANK + token * NORMED_STRIDE + vector_of(place / 8, token) * 8 + group;
    float results[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float scales[STREAMS] = {};
      if (IS_SCALED) {
        const float4 of_token = reinterpret_cast<const float4*>(scales_of(stage))[token + i];
        scales[0] = of_token.x * gains[0], scales[1] = of_token.y * gains[BLOCK_COLUMNS];
        scales[2] = of_token.z * gains[2 * BLOCK_COLUMNS], scales[3] = of_token.w * gains[3 * BLOCK_COLUMNS];
      }
      results[i] = gated_sum<IS_SCALED>(sums[n], i, values + i * NORMED_STRIDE, scales);
    }
    // A lane of an even column stores both columns of the even token, its neighbour those of the odd one.
    const bool is_odd = group % 2;
    const float own = is_odd ? results[1] : results[0];
    const float other = __shfl_xor_sync(FULL_MASK, is_odd ? results[0] : results[1], 4);
    const float low = is_odd ? other : own, high = is_odd ? own : other;
    const int64 row = first + token + is_odd;
    if (row < tokens && column < HIDDEN)
      *reinterpret_cast<uint32*>(mixed + row * HIDDEN + column - is_odd) = pack_bf16(low / STREAMS, high / STREAMS);
  }
}

// With IS_SCALED `normed` are streams without norm: each counts times its `scales` `[tokens, STREAMS]` and `gain`.
template <bool IS_SCALED>
__device__ __forceinline__ void mix_many_tokens(const bf16* lowrank, const bf16* up_weight, const bf16* normed,
                                                const float* scales, const float* gain, bf16* mixed, int tokens) {
  DYNAMIC_SHARED(bf16, stages);  // [STAGES, STAGE_ELEMENTS]
  __shared__ float gains[STREAMS * BLOCK_COLUMNS];
  const int warp = threadIdx.x / WARP, group = threadIdx.x % WARP / 4, part = threadIdx.x % 4;
  const int place = warp * TILE + group, column = min(int(blockIdx.x) * BLOCK_COLUMNS + place, HIDDEN - 1);
  uint4 weights[STREAMS][CHUNKS];
#pragma unroll
  for (int stream = 0; stream < STREAMS; ++stream)
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
      weights[stream][i] = load_streaming(up_weight + (int64(stream) * HIDDEN + column) * RANK + i * CHUNK + part * 8);
  // A lane keeps the gain of its column and of the stream that is its part: there are four of both.
  if (IS_SCALED) gains[part * BLOCK_COLUMNS + place] = gain[part * HIDDEN + column];
  wait_for_previous();
  start_next();
  const int64 hop = int64(gridDim.y) * STAGE;
  int64 first = int64(blockIdx.y) * STAGE;
  const Copies copies(lowrank, normed, scales);
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    if (first + s * hop < tokens) copies.copy<IS_SCALED>(stages + s * STAGE_ELEMENTS, first + s * hop, tokens);
    commit_copies();
  }
  const bool is_late = warp >= WARPS / 2;  // a multiprocessor's scheduler has one warp of each half
  float sums[2][2][4];
  int now = 0;
  for (; first < tokens; first += hop, now = (now + 1) % STAGES) {
    wait_copies<1>();
    __syncthreads();  // also: everyone is done with the stage that is filled next
    bf16* stage = stages + now * STAGE_ELEMENTS;
    if (!is_late) multiply(weights, stage, sums);
    if (first + 2 * hop < tokens)
      copies.copy<IS_SCALED>(stages + (now + 2) % STAGES * STAGE_ELEMENTS, first + 2 * hop, tokens);
    commit_copies();
    if (!is_late)
      mix_stage<IS_SCALED>(sums, stage, gains + place, mixed, first, tokens);
    else if (first >= hop)
      mix_stage<IS_SCALED>(sums, stages + (now + STAGES - 1) % STAGES * STAGE_ELEMENTS, gains + place, mixed, first - hop,
                           tokens);
    if (is_late) multiply(weights, stage, sums);
  }
  if (is_late && first >= hop)
    mix_stage<IS_SCALED>(sums, stages + (now + STAGES - 1) % STAGES * STAGE_ELEMENTS, gains + place, mixed, first - hop,
                         tokens);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
hc_gate_mix_many_tokens(const bf16* lowrank, const bf16* up_weight, const bf16* normed, bf16* mixed, int tokens) {
  mix_many_tokens<false>(lowrank, up_weight, normed, nullptr, nullptr, mixed, tokens);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
hc_gate_mix_many_scaled_tokens(const bf16* lowrank, const bf16* up_weight, const bf16* combined, const float* scales,
                               const float* gain, bf16* mixed, int tokens) {
  mix_many_tokens<true>(lowrank, up_weight, combined, scales, gain, mixed, tokens);
}
