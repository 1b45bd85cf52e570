// The thin projections for many tokens, as a product of tiles: BLOCK_TOKENS by TILES * 16 weight rows, and for each
// such tile a few blocks that share the columns. A second kernel adds these up.
// ROWS, WIDTH: of the weight; STREAMS; TILES of 16 rows, BLOCK_TOKENS (64 or 128) and STAGES of a block; bf16 only.
#include "hc_project/outputs.cuh"

constexpr int WARPS = 4, THREADS = WARPS * WARP;
constexpr int BLOCK_ROWS = TILES * 16, TOKEN_TILES = BLOCK_TOKENS / WARPS / 8;
constexpr int STEP = 64, VECTORS = STEP / 8;  // columns a stage, and vectors of 8 in them
constexpr int STAGE_ROWS = BLOCK_TOKENS + BLOCK_ROWS;
constexpr int PADDED_ROWS = ceil_div(ROWS, 16) * 16, STEPS = ceil_div(WIDTH, STEP);

// Where vector `v` of row `row` lies in a stage: two rows that a quarter of a warp reads together share no bank.
__device__ __forceinline__ int swizzled(int row, int v) { return row * VECTORS + (v ^ (row & 1) << 2); }

// Copies rows `from` up to `to` of a stage, first the tokens' and then the weight's.
__device__ __forceinline__ void copy_rows(uint4* stage, const bf16* normed, const bf16* weight, int step, int tokens,
                                          int from, int to) {
  const int64 first_token = int64(blockIdx.x) * BLOCK_TOKENS;
  const int first_row = blockIdx.y * BLOCK_ROWS;
#pragma unroll 4
  for (int i = from * VECTORS + threadIdx.x; i < to * VECTORS; i += THREADS) {
    const int row = i / VECTORS, column = step * STEP + i % VECTORS * 8;
    const bool is_token = row < BLOCK_TOKENS;
    const int64 source = is_token ? first_token + row : first_row + row - BLOCK_TOKENS;
    const bool valid = source < (is_token ? tokens : ROWS) && column < WIDTH;
    const bf16* base = is_token ? normed : weight;
    copy_async_16(stage + swizzled(row, i % VECTORS), valid ? base + source * WIDTH + column : base, valid);
  }
}

// One stage: [BLOCK_ROWS, STEP] times [STEP, the warp's tokens].
__device__ __forceinline__ void multiply_stage(const uint4* stage, float (&sums)[TILES][TOKEN_TILES][4]) {
  const int group = threadIdx.x % WARP / 4, part = threadIdx.x % 4;
  const int token = threadIdx.x / WARP * TOKEN_TILES * 8 + group;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint4 x[TOKEN_TILES];
#pragma unroll
    for (int j = 0; j < TOKEN_TILES; ++j) x[j] = stage[swizzled(token + 8 * j, half * 4 + part)];
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const int row = BLOCK_TOKENS + i * 16 + group;
      const uint4 low = stage[swizzled(row, half * 4 + part)], high = stage[swizzled(row + 8, half * 4 + part)];
      const uint32 first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
      for (int j = 0; j < TOKEN_TILES; ++j) {
        const uint32 first_x[2] = {x[j].x, x[j].y}, second_x[2] = {x[j].z, x[j].w};
        mma_16x8x16(sums[i][j], first, first_x);
        mma_16x8x16(sums[i][j], second, second_x);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
hc_project_many_tokens(const bf16* normed, const bf16* weight, float* partial, int tokens) {
  DYNAMIC_SHARED(uint4, stages);  // [STAGES, STAGE_ROWS, VECTORS]
  const int begin = blockIdx.z * STEPS / gridDim.z, end = (blockIdx.z + 1) * STEPS / gridDim.z;
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s)
    if (begin + s < end)
      copy_rows(stages + s * STAGE_ROWS * VECTORS, normed, weight, begin + s, tokens, BLOCK_TOKENS, STAGE_ROWS);
  wait_for_previous();
  start_next();
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    if (begin + s < end)
      copy_rows(stages + s * STAGE_ROWS * VECTORS, normed, weight, begin + s, tokens, 0, BLOCK_TOKENS);
    commit_copies();
  }
  float sums[TILES][TOKEN_TILES][4] = {};
  for (int step = begin; step < end; ++step) {
    wait_copies<STAGES - 2>();
    __syncthreads();  // also: everyone has read the stage that is filled next
    const int next = step + STAGES - 1;
    if (next < end)
      copy_rows(stages + (next - begin) % STAGES * STAGE_ROWS * VECTORS, normed, weight, next, tokens, 0, STAGE_ROWS);
    commit_copies();
    multiply_stage(stages + (step - begin) % STAGES * STAGE_ROWS * VECTORS, sums);
  }
  const int group = threadIdx.x % WARP / 4, part = threadIdx.x % 4;
  float* to = partial + int64(blockIdx.z) * tokens * PADDED_ROWS;
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int j = 0; j < TOKEN_TILES; ++j)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int tile = threadIdx.x / WARP * TOKEN_TILES + j;
        const int64 token = int64(blockIdx.x) * BLOCK_TOKENS + tile * 8 + part * 2 + k % 2;
        const int row = blockIdx.y * BLOCK_ROWS + i * 16 + group + k / 2 * 8;
        if (token < tokens && row < PADDED_ROWS) to[token * PADDED_ROWS + row] = sums[i][j][k];
      }
}

// Adds up the splits, a thread for each row of each token.
extern "C" __global__ void __launch_bounds__(THREADS)
hc_project_add_splits(const float* partial, bf16* lowrank, bf16* inject, int tokens, int splits) {
  const int64 item = int64(blockIdx.x) * THREADS + threadIdx.x, token = item / PADDED_ROWS;
  const int row = item % PADDED_ROWS;
  wait_for_previous();
  start_next();
  if (token >= tokens || row >= ROWS) return;
  float sum = 0.f;
#pragma unroll 8
  for (int split = 0; split < splits; ++split) sum += __ldcg(partial + split * int64(tokens) * PADDED_ROWS + item);
  store_projection(sum, token, row, ROWS - STREAMS, STREAMS, lowrank, inject);
}
