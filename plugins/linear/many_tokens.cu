// out[T, N] = x[T, K] weight^T for tiles of TOKENS (16, 32 or 64) tokens that arrange_tokens.cu has put in order.
//
// A block multiplies ROWS rows with one tile of tokens over a part of K: ROW_WARPS warps side by side, of 32 rows each, and
// K_WARPS warps that take turns at the steps of K. Weights come to registers DEPTH steps ahead, tokens to shared memory in a ring
// of STAGES. Tiles of tokens are next to each other in the grid, so that they find the rows in L2. blockIdx.z is the
// part of K; if there are several, the last block to finish adds up the sums.
// FORMAT, OUTPUT, SCALES_ROWS: as in few_tokens.cu.
#include "q4e.cuh"
#include "weight_product.cuh"

constexpr int ROW_WARPS = 4, ROW_TILES = 2, K_WARPS = 2, THREADS = ROW_WARPS * K_WARPS * WARP;
constexpr int WARP_ROWS = 16 * ROW_TILES, ROWS = ROW_WARPS * WARP_ROWS, TILES = TOKENS / 8;
constexpr int STAGES = 3, DEPTH = 2;
constexpr int GROUP_UNITS = 4 * TOKENS, STEP_UNITS = FORMAT::GROUPS * GROUP_UNITS, STAGE_UNITS = K_WARPS * STEP_UNITS;
constexpr int SUM_STRIDE = ROWS + 4;
static_assert(THREADS % ROWS == 0, "a thread finishes one row");

using Fragment = FORMAT::Fragment;
using Rows = FORMAT::Rows;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
many_tokens(const uint4* arranged, const void* weight, const void* block_scales, const float* row_scales, OUTPUT* out,
            float* partial_sums, uint32* arrivals, int tokens, int rows, int columns, int part_stages) {
  DYNAMIC_SHARED(uint4, staged);
  start_next();
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  const int row_warp = warp % ROW_WARPS, k_warp = warp / ROW_WARPS;
  const int first_token = blockIdx.x * TOKENS, first_row = blockIdx.y * ROWS;
  const int steps = ceil_div(columns, FORMAT::STEP), first_step = blockIdx.z * part_stages * K_WARPS;
  const int last_step = min(steps, first_step + part_stages * K_WARPS);
  const int k = (first_step + k_warp) * FORMAT::STEP + t * 8 * FORMAT::GROUPS;

  Rows from[ROW_TILES];
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i) {
    const int row = first_row + row_warp * WARP_ROWS + 16 * i + g;
    from[i] = FORMAT::locate(weight, block_scales, columns, min(row, rows - 1), min(row + 8, rows - 1), k);
  }
  Fragment fragments[DEPTH][ROW_TILES];
  auto load = [&](int stage, Fragment (&to)[ROW_TILES]) {
    const int offset = stage * K_WARPS * FORMAT::STEP;
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) to[i] = FORMAT::load(from[i], offset, stage < part_stages && k + offset < columns);
  };
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) load(i, fragments[i]);

  // A stage is K_WARPS steps in a row. Steps beyond the part's are zeros: fragments of them are zero as well.
  const uint4* tile = arranged + (int64(blockIdx.x) * steps + first_step) * STEP_UNITS + threadIdx.x;
  auto copy_stage = [&](int stage) {
    const uint4* source = tile + int64(stage) * STAGE_UNITS;
    uint4* target = staged + stage % STAGES * STAGE_UNITS + threadIdx.x;
    const int units = (last_step - first_step - stage * K_WARPS) * STEP_UNITS - int(threadIdx.x);
#pragma unroll
    for (int i = 0; i < STAGE_UNITS; i += THREADS)
      if (i + THREADS <= STAGE_UNITS || i + threadIdx.x < STAGE_UNITS) copy_async_16(target + i, source + i, i < units);
    commit_copies();
  };
  wait_for_previous();
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) copy_stage(stage);
  float sums[ROW_TILES][TILES][4] = {};
  for (int first = 0; first < part_stages; first += DEPTH) {
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      const int stage = first + i;
      wait_copies<STAGES - 2>();
      __syncthreads();
      copy_stage(stage + STAGES - 1);
      const uint4* x = staged + stage % STAGES * STAGE_UNITS + k_warp * STEP_UNITS + lane;
      multiply_step<FORMAT, ROW_TILES, TILES, 1>(fragments[i], x, GROUP_UNITS, WARP, sums);
      load(stage + DEPTH, fragments[i]);
    }
  }

  // The sums of the K_WARPS warps meet in shared memory, [k_warp, token, row].
  wait_copies<0>();
  __syncthreads();
  float* totals = reinterpret_cast<float*>(staged);
#pragma unroll
  for (int i = 0; i < ROW_TILES * TILES * 4; ++i) {
    const int row_tile = i / (4 * TILES), token = i / 4 % TILES * 8 + 2 * t + i % 2;
    const int row = row_warp * WARP_ROWS + row_tile * 16 + i % 4 / 2 * 8 + g;
    totals[(k_warp * TOKENS + token) * SUM_STRIDE + row] = sums[row_tile][i / 4 % TILES][i % 4];
  }
  __syncthreads();
  const int place = threadIdx.x % ROWS, row = first_row + place;
  const int end = min(TOKENS, tokens - first_token);
  const Result<FORMAT, OUTPUT, SCALES_ROWS> result = {out, row_scales, rows};
  const PartialSums partial = {partial_sums, tokens, rows, int(gridDim.z)};
  const float scale = result.scale(row);
#pragma unroll 8
  for (int token = threadIdx.x / ROWS; token < end && row < rows; token += THREADS / ROWS) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < K_WARPS; ++i) sum += totals[(i * TOKENS + token) * SUM_STRIDE + place];
    if (gridDim.z == 1) result.store(first_token + token, row, sum, scale);
    else *partial.at(blockIdx.z, first_token + token, row) = sum;
  }
  if (gridDim.z == 1 || !is_last_block(arrivals + blockIdx.y * gridDim.x + blockIdx.x, gridDim.z)) return;
#pragma unroll 8
  for (int token = threadIdx.x / ROWS; token < end && row < rows; token += THREADS / ROWS)
    result.store(first_token + token, row, partial.total(first_token + token, row), scale);
}
