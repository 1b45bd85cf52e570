// out[T, N] = x[T, K] weight^T for at most TOKENS (1, 2, 4 or 8) tokens: reads the weight once, at the speed of memory.
//
// A tile is TILE_ROWS rows by a part of K, which K_WARPS warps share: they take turns at its steps, of which each has
// SEGMENTS * DEPTH. A block works on ROW_TILES tiles side by side and goes on to others of the same part of K, whose tokens
// stay in shared memory. A warp's next DEPTH steps are on their way to slots of its own, the block scales of the next
// tile to one of two places of all warps of the tile. blockIdx.y is the part of K; if there are several, the last block
// to finish a tile adds up the sums.
// FORMAT: of weight_formats.cuh; OUTPUT: bf16 or float; SCALES_ROWS: whether rows have scales; IS_WHOLE: whether no step
// lies beyond K.
#include "q4e.cuh"
#include "weight_product.cuh"

constexpr int THREADS = 256, WARPS = THREADS / WARP, ROW_TILES = WARPS / K_WARPS, TILE_THREADS = K_WARPS * WARP;
constexpr int TILE_ROWS = 8 * TILE_HALVES, GROUPS = FORMAT::GROUPS, STRIDE = K_WARPS * FORMAT::STEP;
constexpr int STEPS = SEGMENTS * DEPTH, PART_COLUMNS = STEPS * STRIDE;
// Tokens in shared memory, in units of 16 bytes: [step, group, token, lane of a row]; the padding avoids bank conflicts.
constexpr int GROUP_UNITS = 4 * TOKENS + (TOKENS > 1 && GROUPS > 1 ? 8 / GROUPS : 0), STEP_UNITS = GROUPS * GROUP_UNITS;
constexpr int SLOT_BYTES = TILE_HALVES * 512, SCALE_BYTES = FORMAT::scale_bytes(TILE_HALVES, PART_COLUMNS);
constexpr int SUM_STRIDE = TILE_ROWS + 4;
constexpr int MAX_PART_TILES = 1024;  // of one block, where K has parts

// The tokens from column `first` on, zeros in the last step beyond the last column. A token that does not exist is the
// last one again.
__device__ __forceinline__ void stage_tokens(uint4* staged, const bf16* x, int tokens, int columns, int first) {
  constexpr int STEP_CHUNKS = FORMAT::STEP / 8, CHUNKS = ceil_div(PART_COLUMNS / 8, THREADS);
  constexpr int BATCH = TOKENS * CHUNKS <= 12 ? CHUNKS : ceil_div(12, TOKENS);  // chunks on their way at once
  const int staged_columns = ceil_div(columns, FORMAT::STEP) * FORMAT::STEP;
#pragma unroll
  for (int base = 0; base < CHUNKS; base += BATCH) {
    uint4 values[BATCH][TOKENS];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int chunk = (base + i) * THREADS + threadIdx.x, k = first + 8 * chunk;
      const bool exists = base + i < CHUNKS && 8 * chunk < PART_COLUMNS && k < columns;
#pragma unroll
      for (int token = 0; token < TOKENS; ++token) {
        const bf16* from = x + int64(min(token, tokens - 1)) * columns + k;
        values[i][token] = exists ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
      }
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int chunk = (base + i) * THREADS + threadIdx.x;
      const bool is_staged = base + i < CHUNKS && 8 * chunk < PART_COLUMNS && first + 8 * chunk < staged_columns;
      const int step = chunk / STEP_CHUNKS, t = chunk % STEP_CHUNKS / GROUPS, group = chunk % GROUPS;
      uint4* to = staged + step * STEP_UNITS + group * GROUP_UNITS + t;
      if (is_staged) {
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) to[4 * token] = FORMAT::arrange(values[i][token]);
      }
    }
  }
}

// Of this block's tiles, those that it is the last of all parts to finish.
__device__ __forceinline__ void add_parts(const PartialSums& partial, const Result<FORMAT, OUTPUT, SCALES_ROWS>& result,
                                          uint32* arrivals, int first_tile, int num_tiles) {
  __shared__ bool is_last[MAX_PART_TILES];
  __syncthreads();
  const int mine = ceil_div(num_tiles - first_tile, int(gridDim.x));
  for (int i = threadIdx.x; i < mine; i += THREADS)
    is_last[i] = is_last_arrival(arrivals + first_tile + i * gridDim.x, partial.parts);
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
  DYNAMIC_SHARED(uint8, shared);
  __shared__ float sums[2][WARPS][TOKENS * SUM_STRIDE];
  const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
  const int k_warp = warp % K_WARPS, row_tile = warp / K_WARPS;
  const int num_tiles = ceil_div(rows, TILE_ROWS), tiles_apart = ROW_TILES * gridDim.x;
  // Blocks with a tile more than others are different ones in each part of K, so that no multiprocessor gets them all.
  const int first_tile = (blockIdx.x + blockIdx.y * gridDim.x / gridDim.y) % gridDim.x;
  const int first_column = blockIdx.y * PART_COLUMNS, k = first_column + k_warp * FORMAT::STEP + t * 8 * GROUPS;
  const PartialSums partial = {partial_sums, tokens, rows, int(gridDim.y)};
  const Result<FORMAT, OUTPUT, SCALES_ROWS> result = {out, row_scales, rows};

  uint8* ring = shared + warp * DEPTH * SLOT_BYTES;
  uint8* scales = shared + WARPS * DEPTH * SLOT_BYTES + row_tile * 2 * SCALE_BYTES;
  uint4* staged = reinterpret_cast<uint4*>(shared + WARPS * DEPTH * SLOT_BYTES + ROW_TILES * 2 * SCALE_BYTES);
  auto locate = [&](int tile) {
    const int row = tile * TILE_ROWS + g;
    return FORMAT::locate(weight, block_scales, columns, min(row, rows - 1), min(row + 8, rows - 1), k);
  };
  auto copy_step = [&](const FORMAT::Rows& from, int tile, int step, int slot) {
    const bool exists = tile < num_tiles && k + step * STRIDE < columns;
    FORMAT::copy_values<TILE_HALVES>(ring + slot * SLOT_BYTES, from, step * STRIDE, exists);
  };
  auto copy_scales = [&](int tile, int place) {
    if (tile < num_tiles)
      FORMAT::copy_scales<TILE_HALVES, PART_COLUMNS, TILE_THREADS>(scales + place * SCALE_BYTES, block_scales, tile * TILE_ROWS,
                                                                   rows, first_column, columns, threadIdx.x % TILE_THREADS);
  };
  int tile = first_tile + row_tile * gridDim.x;
  FORMAT::Rows from = locate(tile);
#pragma unroll
  for (int step = 0; step < DEPTH; ++step) {
    copy_step(from, tile, step, step);
    if (step == 0) copy_scales(tile, 0);
    commit_copies();
  }
  const int place = threadIdx.x % TILE_ROWS, token = threadIdx.x % TILE_THREADS / TILE_ROWS;  // of this thread's output
  float scale = result.scale(tile * TILE_ROWS + place);

  start_next();
  wait_for_previous();
  stage_tokens(staged, x, tokens, columns, first_column);
  wait_copies<DEPTH - 1>();
  __syncthreads();
  const uint4* mine = staged + k_warp * STEP_UNITS + g % TOKENS * 4 + t;
  const int rounds = ceil_div(num_tiles, tiles_apart);
  for (int round = 0; round < rounds; ++round, tile += tiles_apart) {
    const int row = tile * TILE_ROWS + place;
    const float next_scale = result.scale(row + tiles_apart * TILE_ROWS);
    float products[1][2][4] = {};
    for (int segment = 0; segment < SEGMENTS; ++segment) {
      // A group of copies at the start of each segment, so that there are always DEPTH younger than a step's.
      if (segment == 0) copy_scales(tile + tiles_apart, (round + 1) % 2);
      commit_copies();
      const bool is_last = segment == SEGMENTS - 1;  // its successor is the next tile's first
      if (is_last) from = locate(tile + tiles_apart);
#pragma unroll 1  // the code of a step is long enough
      for (int i = 0; i < DEPTH; ++i) {
        const int step = (segment * DEPTH + i) * K_WARPS;
        wait_copies<DEPTH>();
        __syncwarp();
        const FORMAT::Fragment fragment[1] = {FORMAT::read_tile<TILE_HALVES, PART_COLUMNS>(
            ring + i * SLOT_BYTES, scales + round % 2 * SCALE_BYTES, step + k_warp)};
        __syncwarp();
        copy_step(from, is_last ? tile + tiles_apart : tile, is_last ? i : (segment + 1) * DEPTH + i, i);
        commit_copies();
        if (IS_WHOLE || first_column + (step + k_warp) * FORMAT::STEP < columns)
          multiply_step<FORMAT, 1, 1, 2, TILE_HALVES>(fragment, mine + step * STEP_UNITS, GROUP_UNITS, 0, products);
      }
    }
    auto& buffer = sums[round % 2];
#pragma unroll
    for (int i = 0; i < 2 * TILE_HALVES; ++i)
      if (2 * t + i % 2 < TOKENS)
        buffer[warp][(2 * t + i % 2) * SUM_STRIDE + g + i / 2 * 8] = products[0][0][i] + products[0][1][i];
    wait_copies<DEPTH>();  // the next tile's scales
    __syncthreads();
    if (token < tokens && row < rows) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < K_WARPS; ++i)
        sum += buffer[row_tile * K_WARPS + i][token * SUM_STRIDE + place];
      if (gridDim.y == 1) result.store(token, row, sum, scale);
      else *partial.at(blockIdx.y, token, row) = sum;
    }
    scale = next_scale;
  }
  if (gridDim.y > 1) add_parts(partial, result, arrivals, first_tile, num_tiles);
}
