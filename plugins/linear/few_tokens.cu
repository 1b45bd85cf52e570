// out[T, N] = x[T, K] weight^T for at most TOKENS (1, 2, 4 or 8) tokens: reads the weight once, at the speed of memory.
//
// A tile is TILE_ROWS rows by a part of K, which K_WARPS (4 or 8) warps share: SEGMENTS times STEPS steps each. A block works on ROW_TILES
// tiles side by side and goes on to others of the same part of K, whose tokens stay in shared memory. The next STEPS steps
// of a warp are on their way to registers while it multiplies. blockIdx.y is the part of K; if there are several, the
// last block to finish a tile adds up the sums.
// FORMAT: of weight_formats.cuh; OUTPUT: bf16 or float; SCALES_ROWS: whether rows have scales.
#include "q4e.cuh"
#include "weight_product.cuh"

constexpr int THREADS = 256, TILE_ROWS = 8 * TILE_HALVES, TILE_THREADS = K_WARPS * WARP, ROW_TILES = THREADS / TILE_THREADS;
constexpr int GROUPS = FORMAT::GROUPS, STRIDE = K_WARPS * FORMAT::STEP;
constexpr int PART_COLUMNS = SEGMENTS * STEPS * STRIDE;
// Tokens in shared memory, in units of 16 bytes: [step, group, token, lane of a row]; the padding avoids bank conflicts.
constexpr int GROUP_UNITS = 4 * TOKENS + (GROUPS > 1 ? 8 / GROUPS : 0), STEP_UNITS = GROUPS * GROUP_UNITS;
constexpr int SUM_STRIDE = TILE_ROWS + 4;
constexpr int MAX_PART_TILES = 64;  // of one block, where K has parts

using Fragment = FORMAT::Fragment;
using Rows = FORMAT::Rows;

// The tokens from column `first` on, zeros beyond the last column. A token that does not exist is the last one again.
__device__ __forceinline__ void stage_tokens(uint4* staged, const bf16* x, int tokens, int columns, int first) {
  constexpr int CHUNKS = PART_COLUMNS / 8, STEP_CHUNKS = FORMAT::STEP / 8;
#pragma unroll 5
  for (int i = threadIdx.x; i < TOKENS * CHUNKS; i += THREADS) {
    const int token = i / CHUNKS, chunk = i % CHUNKS, k = first + 8 * chunk;
    const int step = chunk / STEP_CHUNKS, t = chunk % STEP_CHUNKS / GROUPS, group = chunk % GROUPS;
    const bf16* from = x + int64(min(token, tokens - 1)) * columns + k;
    uint4 values = k < columns ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
    staged[step * STEP_UNITS + group * GROUP_UNITS + 4 * token + t] = FORMAT::arrange(values);
  }
}

// Of this block's tiles, those that it is the last of all parts to finish.
__device__ __forceinline__ void add_parts(const PartialSums& partial, const Result<FORMAT, OUTPUT, SCALES_ROWS>& result,
                                          uint32* arrivals, int first_tile, int num_tiles) {
  __shared__ bool is_last[MAX_PART_TILES];
  __syncthreads();
  const int mine = ceil_div(num_tiles - first_tile, int(gridDim.x));
  if (threadIdx.x < mine) {
    is_last[threadIdx.x] = is_last_arrival(arrivals + first_tile + threadIdx.x * gridDim.x, partial.parts);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < mine * partial.tokens * TILE_ROWS; i += THREADS) {
    const int index = i / (TILE_ROWS * partial.tokens), token = i / TILE_ROWS % partial.tokens;
    const int row = (first_tile + index * gridDim.x) * TILE_ROWS + i % TILE_ROWS;
    if (is_last[index] && row < partial.rows) result.store(token, row, partial.total(token, row), result.scale(row));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
few_tokens(const bf16* x, const void* weight, const void* block_scales, const float* row_scales, OUTPUT* out,
           float* partial_sums, uint32* arrivals, int tokens, int rows, int columns) {
  DYNAMIC_SHARED(uint4, staged);
  __shared__ float sums[2][ROW_TILES * K_WARPS][TOKENS * SUM_STRIDE];
  if (START == 0) start_next();
  const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
  const int k_warp = warp % K_WARPS, row_tile = warp / K_WARPS;
  const int num_tiles = ceil_div(rows, TILE_ROWS), tiles_apart = ROW_TILES * gridDim.x;
  // Blocks with a tile more than others are different ones in each part of K, so that no multiprocessor gets them all.
  const int first_tile = (blockIdx.x + blockIdx.y * gridDim.x / gridDim.y) % gridDim.x;
  const int first_column = blockIdx.y * PART_COLUMNS, k = first_column + k_warp * FORMAT::STEP + t * 8 * GROUPS;
  const PartialSums partial = {partial_sums, tokens, rows, int(gridDim.y)};
  const Result<FORMAT, OUTPUT, SCALES_ROWS> result = {out, row_scales, rows};

  auto locate = [&](int tile) {
    const int row = tile * TILE_ROWS + g;
    return FORMAT::locate(weight, block_scales, columns, min(row, rows - 1), min(row + 8, rows - 1), k);
  };
  auto load = [&](const Rows& from, int tile, int step) {
    return FORMAT::load<TILE_HALVES>(from, step * STRIDE, tile < num_tiles && k + step * STRIDE < columns);
  };
  Fragment fragments[STEPS][1];
  int tile = first_tile + row_tile * gridDim.x;
  Rows from = locate(tile);
#pragma unroll
  for (int step = 0; step < STEPS; ++step) fragments[step][0] = load(from, tile, step);
  auto prefetch = [&](int tile) {
    if (tile >= num_tiles) return;
    const Rows ahead = locate(tile);
    for (int step = 0; step < SEGMENTS * STEPS; ++step)
      if (k + step * STRIDE < columns) FORMAT::prefetch<TILE_HALVES>(ahead, step * STRIDE);
  };
  for (int i = 1; i <= PREFETCH; ++i) prefetch(tile + i * tiles_apart);

  if (START == 1) start_next();
  wait_for_previous();
  stage_tokens(staged, x, tokens, columns, first_column);
  __syncthreads();
  if (START == 2) start_next();
  const uint4* mine = staged + k_warp * STEP_UNITS + g % TOKENS * 4 + t;
  const int rounds = ceil_div(num_tiles, tiles_apart);
  for (int round = 0; round < rounds; ++round, tile += tiles_apart) {
    const int token = threadIdx.x % TILE_THREADS / TILE_ROWS, row = tile * TILE_ROWS + threadIdx.x % TILE_ROWS;
    const float scale = result.scale(row);
    float products[1][2][4] = {};
    if (PREFETCH) prefetch(tile + (PREFETCH + 1) * tiles_apart);
    for (int segment = 0; segment < SEGMENTS; ++segment) {
      const bool is_last = segment == SEGMENTS - 1;  // its successor is the next tile's first
      if (is_last) from = locate(tile + tiles_apart);
#pragma unroll
      for (int i = 0; i < STEPS; ++i) {
        const int step = segment * STEPS + i;
        multiply_step<FORMAT, 1, 1, 2, TILE_HALVES>(fragments[i], mine + step * K_WARPS * STEP_UNITS, GROUP_UNITS, 0, products);
        fragments[i][0] = load(from, is_last ? tile + tiles_apart : tile, is_last ? i : step + STEPS);
        if (PIN) __syncwarp();  // the compiler would issue all loads behind the last product
      }
    }
    auto& buffer = sums[round % 2];
#pragma unroll
    for (int i = 0; i < 2 * TILE_HALVES; ++i)
      if (2 * t + i % 2 < TOKENS)
        buffer[warp][(2 * t + i % 2) * SUM_STRIDE + g + i / 2 * 8] =
            products[0][0][i] + products[0][1][i];
    __syncthreads();
    if (token < tokens && row < rows) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < K_WARPS; ++i) sum += buffer[row_tile * K_WARPS + i][token * SUM_STRIDE + threadIdx.x % TILE_ROWS];
      if (gridDim.y == 1) result.store(token, row, sum, scale);
      else *partial.at(blockIdx.y, token, row) = sum;
    }
  }
  if (gridDim.y > 1) add_parts(partial, result, arrivals, first_tile, num_tiles);
}
