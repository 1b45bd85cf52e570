// out[T, N] = x[T, K] weight^T for tiles of TOKENS (16, 32 or 64) tokens.
//
// A block multiplies ROWS rows with one tile of tokens over a part of K: ROW_WARPS warps side by side, of 16 * ROW_TILES rows
// each, by K_WARPS warps that share the steps of a stage. A warp's next DEPTH steps are on their way to slots of its own;
// the tokens of the next stage wait in registers until all warps are through with this one's. Tiles of tokens are next to
// each other in the grid, so that they find the rows in L2. blockIdx.z is the part of K; if there are several, the last
// block to finish adds up the sums.
// FORMAT, OUTPUT, SCALES_ROWS: as in few_tokens.cu.
#include "q4e.cuh"
#include "weight_product.cuh"

constexpr int WARPS = 8, THREADS = WARPS * WARP, K_WARPS = WARPS / ROW_WARPS, ROW_TILES = 2, DEPTH = 3;
constexpr int ROWS = 16 * ROW_TILES * ROW_WARPS, TILES = TOKENS / 8, GROUPS = FORMAT::GROUPS;
constexpr int STRIDE = K_WARPS * FORMAT::STEP, CHUNKS = STRIDE / 8, THREAD_CHUNKS = TOKENS * CHUNKS / THREADS;
// As in few_tokens.cu.
constexpr int GROUP_UNITS = 4 * TOKENS + (GROUPS > 1 ? 8 / GROUPS : 0), STEP_UNITS = GROUPS * GROUP_UNITS;
constexpr int SUM_STRIDE = ROWS + 4, WARP_SLOTS = DEPTH * ROW_TILES;
static_assert(THREADS % ROWS == 0 && THREADS % CHUNKS == 0 && THREAD_CHUNKS > 0, "a thread has whole chunks, and one row");

// The chunks of 8 columns of `stage` that this thread moves, zeros beyond the tokens and columns.
__device__ __forceinline__ void load_tokens(uint4 (&chunks)[THREAD_CHUNKS], const bf16* x, int tokens, int columns, int first) {
  const int k = first + threadIdx.x % CHUNKS * 8;
#pragma unroll
  for (int i = 0; i < THREAD_CHUNKS; ++i) {
    const int token = blockIdx.x * TOKENS + threadIdx.x / CHUNKS + i * (THREADS / CHUNKS);
    const bool exists = token < tokens && k < columns;
    chunks[i] = exists ? *reinterpret_cast<const uint4*>(x + int64(token) * columns + k) : make_uint4(0, 0, 0, 0);
  }
}
__device__ __forceinline__ void store_tokens(uint4* staged, const uint4 (&chunks)[THREAD_CHUNKS]) {
  constexpr int STEP_CHUNKS = FORMAT::STEP / 8;
  const int chunk = threadIdx.x % CHUNKS, t = chunk % STEP_CHUNKS / GROUPS, group = chunk % GROUPS;
  uint4* to = staged + chunk / STEP_CHUNKS * STEP_UNITS + group * GROUP_UNITS + threadIdx.x / CHUNKS * 4 + t;
#pragma unroll
  for (int i = 0; i < THREAD_CHUNKS; ++i) to[i * (THREADS / CHUNKS) * 4] = FORMAT::arrange(chunks[i]);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
many_tokens(const bf16* x, const void* weight, const void* block_scales, const float* row_scales, OUTPUT* out,
            float* partial_sums, uint32* arrivals, int tokens, int rows, int columns, int part_stages) {
  DYNAMIC_SHARED(uint8, shared);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  const int row_warp = warp % ROW_WARPS, k_warp = warp / ROW_WARPS;
  const int first_token = blockIdx.x * TOKENS, first_row = blockIdx.y * ROWS;
  const int first_column = blockIdx.z * part_stages * STRIDE;
  const int k = first_column + k_warp * FORMAT::STEP + t * 8 * GROUPS;
  const int stages = min(part_stages, ceil_div(columns - first_column, STRIDE));

  uint8* slots = shared + warp * WARP_SLOTS * FORMAT::SLOT_BYTES;
  uint4* staged = reinterpret_cast<uint4*>(shared + WARPS * WARP_SLOTS * FORMAT::SLOT_BYTES);
  FORMAT::Rows from[ROW_TILES];
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i) {
    const int row = first_row + (row_warp * ROW_TILES + i) * 16 + g;
    from[i] = FORMAT::locate(weight, block_scales, columns, min(row, rows - 1), min(row + 8, rows - 1), k);
  }
  auto copy_weight = [&](int stage) {
    const bool exists = stage < stages && k + stage * STRIDE < columns;
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
      uint8* slot = slots + (stage % DEPTH * ROW_TILES + i) * FORMAT::SLOT_BYTES;
      FORMAT::copy<2>(slot, from[i], stage * STRIDE, exists);
    }
    commit_copies();
  };
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) copy_weight(i);

  start_next();
  wait_for_previous();
  uint4 chunks[THREAD_CHUNKS];
  load_tokens(chunks, x, tokens, columns, first_column);
  float sums[ROW_TILES][TILES][4] = {};
  for (int stage = 0; stage < stages; ++stage) {
    if (stage > 0) __syncthreads();
    store_tokens(staged, chunks);
    __syncthreads();
    if (stage + 1 < stages) load_tokens(chunks, x, tokens, columns, first_column + (stage + 1) * STRIDE);
    wait_copies<DEPTH - 1>();
    __syncwarp();
    FORMAT::Fragment fragments[ROW_TILES];
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i)
      fragments[i] = FORMAT::read<2>(slots + (stage % DEPTH * ROW_TILES + i) * FORMAT::SLOT_BYTES);
    __syncwarp();
    copy_weight(stage + DEPTH);
    multiply_step<FORMAT, ROW_TILES, TILES, 1>(fragments, staged + k_warp * STEP_UNITS + lane, GROUP_UNITS, WARP, sums);
  }

  // The sums of the K_WARPS warps meet in shared memory, [k_warp, token, row].
  wait_copies<0>();
  __syncthreads();
  float* totals = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int i = 0; i < ROW_TILES * TILES * 4; ++i) {
    const int row_tile = i / (4 * TILES), token = i / 4 % TILES * 8 + 2 * t + i % 2;
    const int row = (row_warp * ROW_TILES + row_tile) * 16 + i % 4 / 2 * 8 + g;
    totals[(k_warp * TOKENS + token) * SUM_STRIDE + row] = sums[row_tile][i / 4 % TILES][i % 4];
  }
  __syncthreads();
  // A thread finishes OUTPUTS tokens of one row. Reads of all of them are under way at once.
  constexpr int OUTPUTS = TOKENS * ROWS / THREADS;
  const int place = threadIdx.x % ROWS, row = first_row + place, first = threadIdx.x / ROWS;
  const Result<FORMAT, OUTPUT, SCALES_ROWS> result = {out, row_scales, rows};
  const PartialSums partial = {partial_sums, tokens, rows, int(gridDim.z)};
  const float scale = result.scale(row);
  auto exists = [&](int i) { return first_token + first + i * (THREADS / ROWS) < tokens && row < rows; };
  auto token = [&](int i) { return first_token + first + i * (THREADS / ROWS); };
  float outputs[OUTPUTS] = {};
#pragma unroll
  for (int i = 0; i < OUTPUTS; ++i) {
#pragma unroll
    for (int j = 0; j < K_WARPS; ++j) outputs[i] += totals[(j * TOKENS + first + i * (THREADS / ROWS)) * SUM_STRIDE + place];
    if (gridDim.z > 1 && exists(i)) *partial.at(blockIdx.z, token(i), row) = outputs[i];
  }
  if (gridDim.z > 1) {
    if (!is_last_block(arrivals + blockIdx.y * gridDim.x + blockIdx.x, gridDim.z)) return;
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) outputs[i] = 0.f;
    for (int part = 0; part < partial.parts; ++part) {
#pragma unroll
      for (int i = 0; i < OUTPUTS; ++i)
        if (exists(i)) outputs[i] += __ldcg(partial.at(part, token(i), row));
    }
  }
#pragma unroll
  for (int i = 0; i < OUTPUTS; ++i)
    if (exists(i)) result.store(token(i), row, outputs[i], scale);
}
