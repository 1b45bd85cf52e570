// Products of many tokens with a weight: persistent blocks that multiply tiles of tokens by tiles of rows.
//
// The warps of a block divide a tile of TOKENS tokens by ROWS rows. Columns go in stages of GEMM_K: tokens by cp.async through
// STAGES buffers in shared memory, rows, which best are one warp's alone, straight to its registers, where they become bf16.
// Both come ahead of the multiplication and across tiles, so that a tile's end overlaps with the start of the next.
// Weights are the A operand and activations the B operand of mma_16x8x16. The rows of a warp are dealt out so that a lane
// has the sums of LANE_ROWS neighbours.
//
// What is multiplied says a Problem:
//   Work                     GemmWork, or what is derived from it
//   count()                  works, at least as many as blocks; block i does i, i + gridDim.x, ...
//   locate(index)            the work
//   x, x_row(work, i)        bf16 [.., columns], and which of its rows is token i of the tile: one that exists
//   values, scales, weight_row(work, i)
//                            the weight [.., columns], and which of its rows is row i of the tile: one that exists. For FP8
//                            the even rows of a warp share the scales of a block, and so do the odd ones
//   columns                  K; a multiple of MULTIPLE of the format
//   HAS_TAIL                 whether it may not be one of GEMM_K
//   rows(work, i)            an object for rows i .. i + LANE_ROWS - 1 of the tile, whose `store(token, sums)` gets the
//                            LANE_ROWS sums of a token of the tile, times 1 / UNIT; also of tokens and rows that do not exist
// and, if works may have several parts,
//   partial_sums, arrivals   float [work.split, part, ROWS * TOKENS], and zeroed counters [work.split]
#pragma once
#include "gemm_formats.cuh"

struct GemmWork {
  int first_token, first_row;      // of the tile
  int first_stage, end_stage;      // of K, at least one
  int split = 0, part = 0, parts = 1;  // several parts of K: the last block to finish adds up the sums
};

// WARP_ROWS and WARP_TOKENS are multiples of 16.
template <typename Format_, int ROW_WARPS_, int TOKEN_WARPS_, int WARP_ROWS_, int WARP_TOKENS_, int STAGES_>
struct GemmShape {
  using Format = Format_;
  static constexpr int ROW_WARPS = ROW_WARPS_, TOKEN_WARPS = TOKEN_WARPS_, STAGES = STAGES_;
  static constexpr int WARP_ROWS = WARP_ROWS_, WARP_TOKENS = WARP_TOKENS_, LANE_ROWS = WARP_ROWS / 8;
  static constexpr int THREADS = WARP * ROW_WARPS * TOKEN_WARPS;
  static constexpr int ROWS = ROW_WARPS * WARP_ROWS, TOKENS = TOKEN_WARPS * WARP_TOKENS;
  static constexpr int TOKEN_BYTES = 2 * GEMM_K, STAGE_BYTES = TOKENS * TOKEN_BYTES;
  static_assert(STAGES >= 3, "one is multiplied, one is here for those who are ahead, one is under way");
};

// Goes through the stages of this block's works.
template <typename Problem>
struct GemmCursor {
  const Problem& problem;
  typename Problem::Work work;
  int index, stage, count;

  __device__ __forceinline__ explicit GemmCursor(const Problem& problem)
      : problem(problem), work(problem.locate(blockIdx.x)), index(blockIdx.x), stage(work.first_stage), count(problem.count()) {}

  // Stays in the last stage, of which nobody uses what comes again.
  __device__ __forceinline__ void advance() {
    if (++stage < work.end_stage) return;
    if (index + int(gridDim.x) >= count) {
      --stage;
    } else {
      index += gridDim.x;
      work = problem.locate(index);
      stage = work.first_stage;
    }
  }
};

template <typename Shape, typename Problem>
struct Gemm {
  using Format = typename Shape::Format;
  using Work = typename Problem::Work;
  static constexpr int THREADS = Shape::THREADS, STAGES = Shape::STAGES, LANE_ROWS = Shape::LANE_ROWS;
  static constexpr int TOKEN_TILES = Shape::WARP_TOKENS / 8, ROW_TILES = Shape::WARP_ROWS / 16;
  static constexpr int PIECES = Shape::TOKEN_BYTES / 16, COPIES = Shape::TOKENS * PIECES / THREADS;
  static_assert(Shape::TOKENS * PIECES % THREADS == 0 && THREADS % (2 * PIECES) == 0, "whole copies of tokens");
  static_assert(TOKEN_TILES % 2 == 0, "tokens are read two tiles ahead");
  static constexpr int STAGES_OF_SCALE = 128 / GEMM_K;
  using Sums = float[ROW_TILES][TOKEN_TILES][4];

  const Problem& problem;
  uint8* shared;
  int buffer;  // of the stage that is multiplied
  GemmCursor<Problem> copies, loads;
  // What this lane multiplies: rows of the next stage as they are stored, of the one before it, both groups of that in bf16,
  // and the next tokens.
  typename Format::Loaded loaded[LANE_ROWS];
  typename Format::Fragment fragments[LANE_ROWS];
  uint32 a[2][ROW_TILES][2][4];
  uint4 b[2];

  __device__ __forceinline__ Gemm(const Problem& problem, uint8* shared)
      : problem(problem), shared(shared), buffer(0), copies(problem), loads(problem) {}

  // Part `i` of COPIES of the stage at `copies`.
  __device__ __forceinline__ void copy_tokens(int i, int to) const {
    const int piece = threadIdx.x % PIECES, token = threadIdx.x / PIECES + i * (THREADS / PIECES);
    const int column = copies.stage * GEMM_K + 8 * piece;
    const bool exists = !Problem::HAS_TAIL || column < problem.columns;
    const uint32 row = problem.x_row(copies.work, token);
    copy_async_16(shared + to * Shape::STAGE_BYTES + token * Shape::TOKEN_BYTES + 16 * (piece ^ token % 2),
                  problem.x + (exists ? column : 0) + uint64(row) * uint32(problem.columns), exists);
  }
  // Row `i` of the stage at `loads`.
  __device__ __forceinline__ void load_row(int i) {
    const int first = threadIdx.x / WARP % Shape::ROW_WARPS * Shape::WARP_ROWS + threadIdx.x % WARP / 4 * LANE_ROWS;
    loaded[i] = Format::template load<Problem::HAS_TAIL>(problem.values, problem.scales,
                                                         problem.weight_row(loads.work, first + i), problem.columns, loads.stage);
  }
  __device__ __forceinline__ uint4 read_tokens(int from, int group, int tile) const {
    const int lane = threadIdx.x % WARP, first = threadIdx.x / WARP / Shape::ROW_WARPS * Shape::WARP_TOKENS;
    const uint8* tokens = shared + from * Shape::STAGE_BYTES + (first + lane / 4) * Shape::TOKEN_BYTES;
    const int piece = (2 * (lane % 4) + group) ^ lane / 4 % 2;
    return *reinterpret_cast<const uint4*>(tokens + 8 * tile * Shape::TOKEN_BYTES + 16 * piece);
  }
  // One of the words that group `group` of the fragments has in A operands.
  __device__ __forceinline__ void decode(int group, int index) {
    const int row = index / 4, word = index % 4;
    a[group][row / 2][word / 2][word % 2 * 2 + row % 2] = Format::decode(fragments[row], group, word);
  }
  __device__ __forceinline__ int next_buffer() const { return buffer == STAGES - 1 ? 0 : buffer + 1; }

  // sums += a stage. Between the products of each of its two groups the next
  // group becomes bf16. Copies and loads begin one by one, since many at once keep the reads of shared memory waiting: in the
  // first group of the tokens of a later stage, to where those of two stages ago were, in the second of rows.
  __device__ __forceinline__ void multiply(Sums& sums) {
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      if (group == 1) {
        commit_copies();
        copies.advance();
        wait_copies<STAGES - 3>();  // for the next stage
        __syncthreads();            // behind which all are through with the stage before
#pragma unroll
        for (int i = 0; i < LANE_ROWS; ++i) fragments[i] = Format::ready(loaded[i]);
      }
#pragma unroll
      for (int j = 0; j < TOKEN_TILES; ++j) {
        const uint4 words = b[j % 2];
        const uint32 pairs[2][2] = {{words.x, words.y}, {words.z, words.w}};
        b[j % 2] = j < TOKEN_TILES - 2 ? read_tokens(buffer, group, j + 2)
                                       : read_tokens(group ? next_buffer() : buffer, 1 - group, j + 2 - TOKEN_TILES);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int tile = 0; tile < ROW_TILES; ++tile) mma_16x8x16(sums[tile][j], a[group][tile][half], pairs[half]);
#pragma unroll
        for (int i = 0; i < 4 * LANE_ROWS; ++i)
          if (i * TOKEN_TILES / (4 * LANE_ROWS) == j) decode(1 - group, i);
#pragma unroll
        for (int i = 0; i < COPIES; ++i)
          if (group == 0 && i * TOKEN_TILES / COPIES == j) copy_tokens(i, buffer < 2 ? buffer + STAGES - 2 : buffer - 2);
#pragma unroll
        for (int i = 0; i < LANE_ROWS; ++i)
          if (group == 1 && i % TOKEN_TILES == j) load_row(i);
      }
    }
    loads.advance();
    buffer = next_buffer();
  }

  // sums += scales * step, for steps of the columns that share a scale, the last of them in stage `at`; clears `step`.
  __device__ __forceinline__ void add_scaled(const Work& now, int at, Sums& sums, Sums& step) const {
    const int first = threadIdx.x / WARP % Shape::ROW_WARPS * Shape::WARP_ROWS;
    float scales[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      scales[i] = Format::sum_scale(problem.scales, problem.columns, problem.weight_row(now, first + i), at * GEMM_K);
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i)
#pragma unroll
      for (int j = 0; j < 4 * TOKEN_TILES; ++j) {
        sums[i][j / 4][j % 4] += scales[j % 4 / 2] * step[i][j / 4][j % 4];
        step[i][j / 4][j % 4] = 0.f;
      }
  }

  // Several parts: true in the last block of all to finish, and `sums` are the total.
  __device__ __forceinline__ bool add_parts(const Work& done, Sums& sums) const {
    constexpr int VECTORS = TOKEN_TILES * ROW_TILES;
    float4* partial = reinterpret_cast<float4*>(problem.partial_sums) + threadIdx.x;
    auto at = [&](int part, int i) {
      return partial + ((int64(done.split) * done.parts + part) * VECTORS + i) * THREADS;
    };
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const float* sum = sums[i / TOKEN_TILES][i % TOKEN_TILES];
      *at(done.part, i) = make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
    if (!is_last_block(problem.arrivals + done.split, done.parts)) return false;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      float* sum = sums[i / TOKEN_TILES][i % TOKEN_TILES];
      sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
    }
    for (int part = 0; part < done.parts; ++part) {
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        const float4 other = __ldcg(at(part, i));
        float* sum = sums[i / TOKEN_TILES][i % TOKEN_TILES];
        sum[0] += other.x, sum[1] += other.y, sum[2] += other.z, sum[3] += other.w;
      }
    }
    return true;
  }

  __device__ __forceinline__ void store(const Work& done, const Sums& sums) const {
    const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    const auto rows = problem.rows(done, warp % Shape::ROW_WARPS * Shape::WARP_ROWS + LANE_ROWS * g);
#pragma unroll
    for (int i = 0; i < 2 * TOKEN_TILES; ++i) {
      float values[LANE_ROWS];
#pragma unroll
      for (int j = 0; j < LANE_ROWS; ++j) values[j] = sums[j / 2][i / 2][j % 2 * 2 + i % 2];
      rows.store(warp / Shape::ROW_WARPS * Shape::WARP_TOKENS + 8 * (i / 2) + 2 * t + i % 2, values);
    }
  }

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int stage = 0; stage < 2; ++stage, loads.advance()) {
#pragma unroll
      for (int i = 0; i < LANE_ROWS; ++i) {
        if (stage == 1) fragments[i] = Format::ready(loaded[i]);
        load_row(i);
      }
    }
    start_next();
    wait_for_previous();
#pragma unroll 1
    for (int i = 0; i < STAGES - 2; ++i, copies.advance()) {
#pragma unroll
      for (int part = 0; part < COPIES; ++part) copy_tokens(part, i);
      commit_copies();
    }
    wait_copies<STAGES - 3>();
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 2; ++j) b[j] = read_tokens(0, 0, j);
#pragma unroll
    for (int i = 0; i < 4 * LANE_ROWS; ++i) decode(0, i);
    for (int mine = blockIdx.x; mine < copies.count; mine += gridDim.x) {
      const Work now = problem.locate(mine);
      Sums sums = {}, step = {};
      for (int at = now.first_stage; at < now.end_stage; ++at) {
        if constexpr (Format::HAS_SUM_SCALES) {
          multiply(step);
          if (at % STAGES_OF_SCALE == STAGES_OF_SCALE - 1 || at == now.end_stage - 1) add_scaled(now, at, sums, step);
        } else {
          multiply(sums);
        }
      }
      const Work done = problem.locate(made_anew(mine));
      if (done.parts == 1 || add_parts(done, sums)) store(done, sums);
    }
    wait_copies<0>();
  }
};
