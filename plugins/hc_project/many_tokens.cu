// The thin projections for many tokens, as a product of tiles: a block has TOKEN_TILES * 32 tokens and all weight rows, up
// to 336, so that the stack is read once; a few blocks share the columns of a tile. A second kernel adds these up.
// ROWS, WIDTH: of the weight, whole steps of 32 columns; STREAMS; TOKEN_TILES of 16 tokens and ROW_TILES of 8 weight rows
// a warp; STAGES of the pipeline; bf16 only.
#include "hc_project/outputs.cuh"

constexpr int TOKEN_WARPS = 2, ROW_WARPS = 6, WARPS = TOKEN_WARPS * ROW_WARPS, THREADS = WARPS * WARP;
constexpr int WARP_TOKENS = TOKEN_TILES * 16, WARP_ROWS = ROW_TILES * 8;
constexpr int BLOCK_TOKENS = TOKEN_WARPS * WARP_TOKENS, BLOCK_ROWS = ROW_WARPS * WARP_ROWS;
constexpr int STEP = 32, VECTORS = STEP / 8, STEPS = WIDTH / STEP;  // columns a stage, and vectors of 8 in them
constexpr int PADDED_ROWS = ceil_div(ROWS, 16) * 16;
constexpr int STAGE_VECTORS = (BLOCK_TOKENS + BLOCK_ROWS) * VECTORS;
static_assert(WIDTH % STEP == 0 && BLOCK_TOKENS % 8 == 0 && THREADS % 32 == 0, "whole steps; rows keep their banks");

// Where vector `v` of row `row` is, both of the stage or of eight rows in it: no two of the eight share a bank.
__device__ __forceinline__ int swizzled(int row, int v) { return row * VECTORS + (v ^ (row / 2) % VECTORS); }

// Copies COUNT rows of `from` to a stage, of which `rows` exist; the last one stands for those behind it, since what they
// give is not stored. Where a thread's vectors are in the first step is kept, in bytes.
template <int COUNT>
struct RowCopies {
  static constexpr int ITEMS = ceil_div(COUNT * VECTORS, THREADS);
  const bf16* from;
  uint32 offsets[ITEMS];

  __device__ __forceinline__ RowCopies(const bf16* source, int64 first, int64 rows) : from(source + first * WIDTH) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int64 row = (i * THREADS + int(threadIdx.x)) / VECTORS, last = rows - first - 1;
      offsets[i] = uint32((row < last ? row : last) * WIDTH + threadIdx.x % VECTORS * 8) * uint32(sizeof(bf16));
    }
  }
  __device__ __forceinline__ void copy(uint4* to, int step) const {
    const char* base = reinterpret_cast<const char*>(from + step * STEP);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
      if ((i + 1) * THREADS <= COUNT * VECTORS || i * THREADS + int(threadIdx.x) < COUNT * VECTORS)
        copy_async_16(to + i * THREADS + swizzled(threadIdx.x / VECTORS, threadIdx.x % VECTORS), base + offsets[i]);
  }
};

// One stage: [the warp's tokens, STEP] times [STEP, its weight rows]. `tokens` and `rows` are the first
// rows of each in the stage.
__device__ __forceinline__ void multiply_stage(const uint4* tokens, const uint4* rows, int lane,
                                               float (&sums)[TOKEN_TILES][ROW_TILES][4]) {
  uint32 last[4];  // the tile that has no neighbour: all its columns
  if (ROW_TILES % 2) load_matrices(last, rows + (ROW_TILES - 1) * 8 * VECTORS + swizzled(lane % 8, lane / 8));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32 left[TOKEN_TILES][4];
#pragma unroll
    for (int i = 0; i < TOKEN_TILES; ++i)
      load_matrices(left[i], tokens + i * 16 * VECTORS + swizzled(lane % 16, half * 2 + lane / 16));
#pragma unroll
    for (int j = 0; j < ROW_TILES / 2; ++j) {
      uint32 right[4];
      load_matrices(right, rows + j * 16 * VECTORS + swizzled(lane / 16 * 8 + lane % 8, half * 2 + lane / 8 % 2));
#pragma unroll
      for (int i = 0; i < TOKEN_TILES; ++i) {
        mma_16x8x16(sums[i][2 * j], left[i], right);
        mma_16x8x16(sums[i][2 * j + 1], left[i], right + 2);
      }
    }
    if (ROW_TILES % 2) {
#pragma unroll
      for (int i = 0; i < TOKEN_TILES; ++i) mma_16x8x16(sums[i][ROW_TILES - 1], left[i], last + 2 * half);
    }
  }
}

// Multiplies the sums of a lane's tokens by `factor(token)`.
template <typename Factor>
__device__ __forceinline__ void scale_sums(float (&sums)[TOKEN_TILES][ROW_TILES][4], int64 first_token, int tokens,
                                           Factor factor) {
#pragma unroll
  for (int i = 0; i < TOKEN_TILES * 2; ++i) {
    const int64 token = first_token + i * 8 + threadIdx.x % WARP / 4;
    const float times = factor(token < tokens ? token : tokens - 1);
#pragma unroll
    for (int j = 0; j < ROW_TILES; ++j) sums[i / 2][j][i % 2 * 2] *= times, sums[i / 2][j][i % 2 * 2 + 1] *= times;
  }
}

// With IS_SCALED each stream of a token counts times its `scales` `[tokens, STREAMS]`: the sums are in units of the
// current stream's scale.
template <bool IS_SCALED>
__device__ __forceinline__ void project_many_tokens(const bf16* normed, const bf16* weight, const float* scales,
                                                    float* partial, int tokens) {
  constexpr int STREAM_STEPS = STEPS / STREAMS;
  DYNAMIC_SHARED(uint4, stages);  // [STAGES, BLOCK_TOKENS + BLOCK_ROWS, VECTORS]
  const int begin = blockIdx.z * STEPS / gridDim.z, end = (blockIdx.z + 1) * STEPS / gridDim.z;
  const int64 first_token = int64(blockIdx.x) * BLOCK_TOKENS;
  const int first_row = blockIdx.y * BLOCK_ROWS;
  const RowCopies<BLOCK_ROWS> row_copies(weight, first_row, ROWS);
  const RowCopies<BLOCK_TOKENS> token_copies(normed, first_token, tokens);
  if (IS_SCALED) wait_for_previous();  // the kernel before this one scaled the weight
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s)
    if (begin + s < end) row_copies.copy(stages + s * STAGE_VECTORS + BLOCK_TOKENS * VECTORS, begin + s);
  wait_for_previous();
  start_next();
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    if (begin + s < end) token_copies.copy(stages + s * STAGE_VECTORS, begin + s);
    commit_copies();
  }
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int warp_token = warp % TOKEN_WARPS * WARP_TOKENS, warp_row = warp / TOKEN_WARPS * WARP_ROWS;
  const uint4* own_tokens = stages + warp_token * VECTORS;
  const uint4* own_rows = stages + (BLOCK_TOKENS + warp_row) * VECTORS;
  float sums[TOKEN_TILES][ROW_TILES][4] = {};
  int stage = 0, filled = STAGES - 1;
  for (int step = begin; step < end; ++step) {
    wait_copies<STAGES - 2>();
    __syncthreads();  // also: everyone has read the stage that is filled next
    if (step + STAGES - 1 < end) {
      uint4* to = stages + filled * STAGE_VECTORS;
      token_copies.copy(to, step + STAGES - 1);
      row_copies.copy(to + BLOCK_TOKENS * VECTORS, step + STAGES - 1);
    }
    commit_copies();
    if (IS_SCALED && step > begin && step % STREAM_STEPS == 0) {
      const float* now = scales + step / STREAM_STEPS;
      scale_sums(sums, first_token + warp_token, tokens, [=](int64 token) {
        return __ldcg(now + token * STREAMS - 1) / __ldcg(now + token * STREAMS);
      });
    }
    multiply_stage(own_tokens + stage * STAGE_VECTORS, own_rows + stage * STAGE_VECTORS, lane, sums);
    stage = stage + 1 == STAGES ? 0 : stage + 1, filled = filled + 1 == STAGES ? 0 : filled + 1;
  }
  if (IS_SCALED) {
    const float* last = scales + (end - 1) / STREAM_STEPS;
    scale_sums(sums, first_token + warp_token, tokens, [=](int64 token) { return __ldcg(last + token * STREAMS); });
  }
  float* to = partial + int64(blockIdx.z) * tokens * PADDED_ROWS;
#pragma unroll
  for (int i = 0; i < TOKEN_TILES * 2; ++i) {
    const int64 token = first_token + warp_token + i * 8 + lane / 4;
    if (token >= tokens) continue;
#pragma unroll
    for (int j = 0; j < ROW_TILES; ++j) {
      const int row = first_row + warp_row + j * 8 + lane % 4 * 2;
      const float* pair = sums[i / 2][j] + i % 2 * 2;
      if (row < PADDED_ROWS) *reinterpret_cast<float2*>(to + token * PADDED_ROWS + row) = make_float2(pair[0], pair[1]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
hc_project_many_tokens(const bf16* normed, const bf16* weight, float* partial, int tokens) {
  project_many_tokens<false>(normed, weight, nullptr, partial, tokens);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
hc_project_many_scaled_tokens(const bf16* combined, const bf16* weight, const float* scales, float* partial, int tokens) {
  project_many_tokens<true>(combined, weight, scales, partial, tokens);
}

// Adds up the splits, a thread for four rows of a token.
extern "C" __global__ void __launch_bounds__(THREADS)
hc_project_add_splits(const float* partial, bf16* lowrank, bf16* inject, int tokens, int splits) {
  constexpr int QUADS = PADDED_ROWS / 4;
  const int64 item = int64(blockIdx.x) * THREADS + threadIdx.x, token = item / QUADS;
  const int row = item % QUADS * 4;
  wait_for_previous();
  start_next();
  if (token >= tokens) return;
  float sums[4] = {};
#pragma unroll 4
  for (int split = 0; split < splits; ++split) {
    const float4 part = __ldcg(reinterpret_cast<const float4*>(partial + split * int64(tokens) * PADDED_ROWS) + item);
    sums[0] += part.x, sums[1] += part.y, sums[2] += part.z, sums[3] += part.w;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (row + i < ROWS) store_projection(sums[i], token, row + i, ROWS - STREAMS, STREAMS, lowrank, inject);
}
