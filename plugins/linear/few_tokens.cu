// out[T, N] = x[T, K] weight^T for at most TOKENS (1, 2, 4 or 8) tokens: reads the weight once, at the speed of memory.
//
// Tensor cores multiply 16 rows by 8 columns. With fewer tokens than 8, the columns are CHUNKS steps of K of each token,
// and the 16 rows as many of each of TILE_ROWS rows, of which the products on the diagonal are wanted: no multiplication
// of the decoded weights is in vain, and a tile is small enough to deal out evenly.
// A tile is TILE_ROWS rows by a part of K, which K_WARPS warps share: they take turns at its steps, of which each has
// SEGMENTS * DEPTH. A block works on ROW_TILES tiles side by side and goes on to others of the same part of K, whose tokens
// stay in shared memory. A warp's next DEPTH steps are on their way to slots of its own, the block scales of the next
// tile to one of two places of all warps of the tile. blockIdx.y is the part of K; if there are several, the last block
// to finish a tile adds up the sums.
// FORMAT: of weight_formats.cuh; OUTPUT: bf16 or float; SCALES_ROWS: whether rows have scales; IS_WHOLE: whether no step
// lies beyond K; ONE_ROUND: whether no block has more than ROW_TILES tiles.
#include "q4e.cuh"
#include "weight_product.cuh"

constexpr int THREADS = WARPS * WARP, ROW_TILES = WARPS / K_WARPS, TILE_THREADS = K_WARPS * WARP;
constexpr int TILE_ROWS = 16 / CHUNKS, GROUPS = FORMAT::GROUPS, COLS = TOKENS * CHUNKS;
constexpr int WIDTH = CHUNKS * FORMAT::STEP, STRIDE = K_WARPS * WIDTH;  // of a row, by a warp and by all, in a step
constexpr int STEPS = SEGMENTS * DEPTH, PART_COLUMNS = STEPS * STRIDE;
// Tokens in shared memory, in units of 16 bytes: [step, group, token, chunk, lane of a row]; the padding avoids bank
// conflicts.
constexpr int GROUP_UNITS = 4 * COLS + (COLS > 1 && GROUPS > 1 ? 8 / GROUPS : 0), STEP_UNITS = GROUPS * GROUP_UNITS;
constexpr int SLOT_BYTES = CODE_BYTES, SCALE_BYTES = FORMAT::scale_bytes(TILE_ROWS, PART_COLUMNS);
constexpr int PLACES = ONE_ROUND ? 1 : 2;         // for scales and sums of tiles
constexpr int SUMMANDS = K_WARPS * CHUNKS;        // of an output
constexpr int SUM_STRIDE = SUMMANDS | 1, SUMS = TOKENS * TILE_ROWS * SUM_STRIDE;
constexpr int UNROLL = DEPTH % 2 || WARPS > 10 ? 1 : 2;  // of steps; each takes many registers
constexpr int MAX_PART_TILES = 1024;  // of one block, where K has parts
static_assert(COLS <= 8, "the columns of a tile");

__device__ __forceinline__ void tile_barrier() {
  if constexpr (K_WARPS == 1) __syncwarp();
  else __syncthreads();
}

// The tokens from column `first` on, zeros in the last step beyond the last column. A token that does not exist is the
// last one again.
__device__ __forceinline__ void stage_tokens(uint4* staged, const bf16* x, int tokens, int columns, int first) {
  constexpr int STEP_PIECES = FORMAT::STEP / 8, PIECES = ceil_div(PART_COLUMNS / 8, THREADS);
  constexpr int BATCH = TOKENS * PIECES <= 12 ? PIECES : ceil_div(12, TOKENS);  // on their way at once
  const int staged_columns = ceil_div(columns, WIDTH) * WIDTH;
#pragma unroll
  for (int base = 0; base < PIECES; base += BATCH) {
    uint4 values[BATCH][TOKENS];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int piece = (base + i) * THREADS + threadIdx.x, k = first + 8 * piece;
      const bool exists = base + i < PIECES && 8 * piece < PART_COLUMNS && (IS_WHOLE || k < columns);
#pragma unroll
      for (int token = 0; token < TOKENS; ++token) {
        const bf16* from = x + int64(min(token, tokens - 1)) * columns + k;
        values[i][token] = exists ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
      }
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int piece = (base + i) * THREADS + threadIdx.x;
      const bool is_staged =
          base + i < PIECES && 8 * piece < PART_COLUMNS && (IS_WHOLE || first + 8 * piece < staged_columns);
      const int step = piece / STEP_PIECES / CHUNKS, place = piece / STEP_PIECES % CHUNKS;
      const int t = piece % STEP_PIECES / GROUPS, group = piece % GROUPS;
      uint4* to = staged + step * STEP_UNITS + group * GROUP_UNITS + 4 * place + t;
      if (is_staged) {
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) to[4 * CHUNKS * token] = FORMAT::arrange(values[i][token]);
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
  __shared__ float sums[PLACES][ROW_TILES][SUMS];
  const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
  const int k_warp = warp % K_WARPS, row_tile = warp / K_WARPS, thread = threadIdx.x % TILE_THREADS;
  const int num_tiles = ceil_div(rows, TILE_ROWS), tiles_apart = ROW_TILES * gridDim.x;
  // Blocks with a tile more than others are different ones in each part of K, so that no multiprocessor gets them all.
  const int first_tile = PARTS == 1 ? blockIdx.x : (blockIdx.x + blockIdx.y * gridDim.x / PARTS) % gridDim.x;
  const int first_column = blockIdx.y * PART_COLUMNS;
  const int k = first_column + k_warp * WIDTH + g % CHUNKS * FORMAT::STEP + t * 8 * GROUPS;
  const PartialSums partial = {partial_sums, tokens, rows, PARTS};
  const Result<FORMAT, OUTPUT, SCALES_ROWS> result = {out, row_scales, rows};

  uint8* ring = shared + warp * DEPTH * SLOT_BYTES;
  uint8* scales = shared + WARPS * DEPTH * SLOT_BYTES + row_tile * PLACES * SCALE_BYTES;
  uint4* staged = reinterpret_cast<uint4*>(shared + WARPS * DEPTH * SLOT_BYTES + ROW_TILES * PLACES * SCALE_BYTES);
  auto locate = [&](int tile) {
    const int row = tile * TILE_ROWS + g / CHUNKS;
    return FORMAT::locate(weight, block_scales, columns, min(row, rows - 1), min(row + 8 / CHUNKS, rows - 1), k);
  };
  auto copy_step = [&](const FORMAT::Rows& from, int tile, int step, int slot) {
    if (tile < num_tiles)
      FORMAT::copy_values(ring + slot * SLOT_BYTES, from, step * STRIDE, IS_WHOLE || k + step * STRIDE < columns);
  };
  auto copy_scales = [&](int tile, int place) {
    if (tile < num_tiles)
      FORMAT::copy_scales<TILE_ROWS, PART_COLUMNS, TILE_THREADS>(scales + place * SCALE_BYTES, block_scales, tile * TILE_ROWS,
                                                                 rows, first_column, columns, thread);
  };
  // The tokens' way to L2 must not begin behind that of all the weights.
  const int line = blockIdx.x + gridDim.x * threadIdx.x;
  if (blockIdx.y == 0 && line < ceil_div(tokens * columns, 64)) prefetch_l2(x + 64 * line);
  int tile = first_tile + row_tile * gridDim.x;
  FORMAT::Rows from = locate(tile);
#pragma unroll
  for (int step = 0; step < DEPTH; ++step) {
    copy_step(from, tile, step, step);
    if (step == 0) copy_scales(tile, 0);
    commit_copies();
  }
  float scale = result.scale(tile * TILE_ROWS + thread % TILE_ROWS);

  start_next();
  wait_for_previous();
  stage_tokens(staged, x, tokens, columns, first_column);
  wait_copies<DEPTH - 1>();
  __syncthreads();
  const uint4* mine = staged + k_warp * STEP_UNITS + g % COLS * 4 + t;
  const int rounds = ONE_ROUND ? 1 : ceil_div(num_tiles, tiles_apart);
  for (int round = 0; round < rounds; ++round, tile += tiles_apart) {
    const int next_tile = tile + tiles_apart, place = ONE_ROUND ? 0 : round % 2;
    const float next_scale = ONE_ROUND ? 0.f : result.scale(next_tile * TILE_ROWS + thread % TILE_ROWS);
    float products[1][2][4] = {};
    for (int segment = 0; segment < SEGMENTS; ++segment) {
      // A group of copies at the start of each segment, so that there are always DEPTH younger than a step's.
      if (!ONE_ROUND && segment == 0) copy_scales(next_tile, 1 - place);
      commit_copies();
      const bool is_last = segment == SEGMENTS - 1;  // its successor is the next tile's first
      if (!ONE_ROUND && is_last) from = locate(next_tile);
#pragma unroll UNROLL
      for (int i = 0; i < DEPTH; ++i) {
        const int step = (segment * DEPTH + i) * K_WARPS;
        wait_copies<DEPTH>();
        const FORMAT::Fragment fragment[1] = {FORMAT::read_tile<CHUNKS, PART_COLUMNS>(
            ring + i * SLOT_BYTES, scales + place * SCALE_BYTES, (step + k_warp) * CHUNKS)};
        if (!is_last) copy_step(from, tile, (segment + 1) * DEPTH + i, i);
        else if (!ONE_ROUND) copy_step(from, next_tile, i, i);
        commit_copies();
        if (IS_WHOLE || first_column + (step + k_warp) * WIDTH < columns)
          multiply_step<FORMAT, 1, 1, 2>(fragment, mine + step * STEP_UNITS, GROUP_UNITS, 0, products);
      }
    }
    float* buffer = sums[place][row_tile];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = 2 * t + i % 2, row = (g + i / 2 * 8) / CHUNKS;
      if (column < COLS && column % CHUNKS == g % CHUNKS)
        buffer[(column / CHUNKS * TILE_ROWS + row) * SUM_STRIDE + k_warp * CHUNKS + g % CHUNKS] =
            products[0][0][i] + products[0][1][i];
    }
    wait_copies<DEPTH>();  // the next tile's scales
    tile_barrier();
#pragma unroll
    for (int i = 0; i < TOKENS * TILE_ROWS; i += TILE_THREADS) {
      const int output = i + thread, token = output / TILE_ROWS, row = tile * TILE_ROWS + output % TILE_ROWS;
      if (output >= TOKENS * TILE_ROWS || token >= tokens || row >= rows) continue;
      float sum = 0.f;
#pragma unroll
      for (int summand = 0; summand < SUMMANDS; ++summand) sum += buffer[output * SUM_STRIDE + summand];
      if (PARTS == 1) result.store(token, row, sum, scale);
      else *partial.at(blockIdx.y, token, row) = sum;
    }
    scale = next_scale;
  }
  if constexpr (PARTS > 1) add_parts(partial, result, arrivals, first_tile, num_tiles);
}
