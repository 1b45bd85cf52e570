// Products of many tokens with a weight: persistent blocks that multiply tiles of tokens by tiles of rows.
//
// The warps of a block divide a tile of TOKENS tokens by ROWS rows. Columns go in stages by cp.async through shared memory,
// ahead of the multiplication and across tiles, so that a tile's end overlaps with the start of the next.
// Weights, which become bf16 in registers, are the A operand and activations the B operand of mma_16x8x16. The rows of a warp
// are dealt out so that a lane has the sums of LANE_ROWS neighbours.
//
// What is multiplied says a Problem:
//   Work                     GemmWork, or what is derived from it
//   count()                  works, at least as many as blocks; block i does i, i + gridDim.x, ...
//   locate(index)            the work
//   x, x_row(work, i)        bf16 [.., columns], and which of its rows is token i of the tile: one that exists
//   values, scales, weight_row(work, i)
//                            the weight [.., columns], and which of its rows is row i of the tile: one that exists. For FP8
//                            the even rows of a warp share the scales of a block, and so do the odd ones
//   columns                  K; a multiple of 8, of 128 for NVFP4, of 16 for FP8
//   HAS_TAIL                 whether it may not be one of STAGE_COLUMNS
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

// WARP_ROWS is a multiple of 16, WARP_TOKENS of 16.
template <typename Format_, int ROW_WARPS_, int TOKEN_WARPS_, int WARP_ROWS_, int WARP_TOKENS_>
struct GemmShape {
  using Format = Format_;
  static constexpr int ROW_WARPS = ROW_WARPS_, TOKEN_WARPS = TOKEN_WARPS_;
  static constexpr int WARP_ROWS = WARP_ROWS_, WARP_TOKENS = WARP_TOKENS_, LANE_ROWS = WARP_ROWS / 8;
  static constexpr int THREADS = WARP * ROW_WARPS * TOKEN_WARPS;
  static constexpr int ROWS = ROW_WARPS * WARP_ROWS, TOKENS = TOKEN_WARPS * WARP_TOKENS;
  static constexpr int HALVES = Format::HALVES, STAGE_COLUMNS = HALVES * GEMM_K;
  // Buffers: of tokens for half a stage each, of rows for a stage.
  static constexpr int TOKEN_BUFFERS = 3, ROW_BUFFERS = HALVES == 2 ? 2 : 3;
  static constexpr int TOKEN_BYTES = 2 * GEMM_K, TOKEN_BUFFER = TOKENS * TOKEN_BYTES;
  static constexpr int SCALES_AT = ROWS * Format::ROW_BYTES, ROW_BUFFER = SCALES_AT + ROWS * Format::SCALE_BYTES;
  static constexpr int ROWS_AT = TOKEN_BUFFERS * TOKEN_BUFFER, SHARED_BYTES = ROWS_AT + ROW_BUFFERS * ROW_BUFFER;
};

// The next stage to be copied, and this thread's part of it.
template <typename Shape, typename Problem>
struct GemmCopies {
  using Format = typename Shape::Format;
  static constexpr int THREADS = Shape::THREADS, PIECES = Format::ROW_BYTES / 16, TOKEN_PIECES = Shape::TOKEN_BYTES / 16;
  static constexpr int TOKEN_COPIES = Shape::TOKENS * TOKEN_PIECES / THREADS, ROW_COPIES = Shape::ROWS * PIECES / THREADS;
  static constexpr int SCALE_COPIES = Format::SCALE_BYTES ? ceil_div(Shape::ROWS, THREADS) : 0;
  static constexpr int ROW_PARTS = ROW_COPIES + SCALE_COPIES, TOKEN_PARTS = TOKEN_COPIES;
  static_assert(Shape::TOKENS * TOKEN_PIECES % THREADS == 0 && THREADS % (2 * TOKEN_PIECES) == 0, "whole copies of tokens");
  static_assert(Shape::ROWS * PIECES % THREADS == 0 && THREADS % (4 * PIECES) == 0, "whole copies of rows");

  const Problem& problem;
  uint8* shared;
  int index, stage;
  typename Problem::Work work;

  // Places 8i + g of a warp are row i of lane g.
  static __device__ __forceinline__ int row_in_place(int place) {
    const int in_warp = place % Shape::WARP_ROWS;
    return place - in_warp + in_warp % 8 * Shape::LANE_ROWS + in_warp / 8;
  }

  __device__ __forceinline__ void start() {
    index = blockIdx.x;
    locate();
  }
  __device__ __forceinline__ void advance() {
    if (++stage < work.end_stage) return;
    if (index + int(gridDim.x) >= problem.count()) {  // nobody reads what is copied from here on
      --stage;
    } else {
      index += gridDim.x;
      locate();
    }
  }
  __device__ __forceinline__ void locate() {
    work = problem.locate(index);
    stage = work.first_stage;
  }

  // Part `i` of ROW_PARTS of the rows of the stage, and of TOKEN_PARTS of the tokens of one of its halves.
  __device__ __forceinline__ void copy_rows(int i, int buffer) const {
    constexpr int COLUMNS = Shape::STAGE_COLUMNS / PIECES;  // of 16 bytes
    uint8* to = shared + Shape::ROWS_AT + buffer * Shape::ROW_BUFFER;
    if (i < ROW_COPIES) {
      const int piece = threadIdx.x % PIECES, place = threadIdx.x / PIECES;
      copy_16(to + (place + i * (THREADS / PIECES)) * Format::ROW_BYTES + Format::place(place, piece), problem.values,
              stage * PIECES + piece, uint32(problem.columns) / COLUMNS,
              problem.weight_row(work, row_in_place(place + i * (THREADS / PIECES))));
    } else {
      static_assert(Format::SCALE_BYTES == 8 || SCALE_COPIES == 0, "copies of 8 bytes for a row");
      const int place = threadIdx.x + (i - ROW_COPIES) * THREADS;
      const uint64* from = static_cast<const uint64*>(problem.scales) + stage;
      const uint32 row = problem.weight_row(work, row_in_place(place));
      if (Shape::ROWS % THREADS == 0 || place < Shape::ROWS)
        copy_async_8(to + Shape::SCALES_AT + 8 * place,
                     from + uint64(row) * (uint32(problem.columns) / Shape::STAGE_COLUMNS));
    }
  }
  __device__ __forceinline__ void copy_tokens(int i, int half, int buffer) const {
    const int piece = threadIdx.x % TOKEN_PIECES, token = threadIdx.x / TOKEN_PIECES;
    uint8* to = shared + buffer * Shape::TOKEN_BUFFER + token * Shape::TOKEN_BYTES + 16 * (piece ^ token % 2);
    copy_16(to + i * (THREADS / TOKEN_PIECES) * Shape::TOKEN_BYTES, problem.x,
            (stage * Shape::HALVES + half) * TOKEN_PIECES + piece, uint32(problem.columns) / 8,
            problem.x_row(work, token + i * (THREADS / TOKEN_PIECES)));
  }
  // Piece `piece` of the `pieces` of a row.
  static __device__ __forceinline__ void copy_16(uint8* to, const void* from, int piece, uint32 pieces, uint32 row) {
    const bool exists = !Problem::HAS_TAIL || piece < pieces;
    copy_async_16(to, static_cast<const uint4*>(from) + (exists ? piece : 0) + uint64(row) * pieces, exists);
  }
};

template <typename Shape, typename Problem>
struct Gemm {
  using Format = typename Shape::Format;
  using Work = typename Problem::Work;
  using Copies = GemmCopies<Shape, Problem>;
  static constexpr int THREADS = Shape::THREADS, HALVES = Shape::HALVES, LANE_ROWS = Shape::LANE_ROWS;
  static constexpr int TOKEN_TILES = Shape::WARP_TOKENS / 8, ROW_TILES = Shape::WARP_ROWS / 16;
  static_assert(TOKEN_TILES % 2 == 0, "tokens are read two tiles ahead");
  static constexpr int STAGES_OF_SCALE = 128 / Shape::STAGE_COLUMNS;
  static constexpr int AHEAD = 2 / HALVES;  // stages by which copies are ahead
  using Sums = float[ROW_TILES][TOKEN_TILES][4];

  const Problem& problem;
  Copies copies;
  int buffer, row_buffer;  // of the half stage that is multiplied, and of the stage
  // What this lane multiplies: half a stage of its rows as they are stored, both groups of it in bf16, and the next tokens.
  typename Format::Fragment fragments[LANE_ROWS];
  uint32 a[2][ROW_TILES][2][4];
  uint4 b[2];

  __device__ __forceinline__ Gemm(const Problem& problem, uint8* shared)
      : problem(problem), copies{problem, shared}, buffer(0), row_buffer(0) {}

  static __device__ __forceinline__ int after(int buffer, int buffers) { return buffer == buffers - 1 ? 0 : buffer + 1; }
  static __device__ __forceinline__ int before(int buffer, int buffers) { return buffer == 0 ? buffers - 1 : buffer - 1; }
  __device__ __forceinline__ uint4 read_tokens(int from, int group, int tile) const {
    const int lane = threadIdx.x % WARP, first = threadIdx.x / WARP / Shape::ROW_WARPS * Shape::WARP_TOKENS;
    const uint8* tokens = copies.shared + from * Shape::TOKEN_BUFFER + (first + lane / 4) * Shape::TOKEN_BYTES;
    const int piece = (2 * (lane % 4) + group) ^ lane / 4 % 2;
    return *reinterpret_cast<const uint4*>(tokens + 8 * tile * Shape::TOKEN_BYTES + 16 * piece);
  }
  __device__ __forceinline__ void read_rows(int from, int half) {
    const int lane = threadIdx.x % WARP, place = threadIdx.x / WARP % Shape::ROW_WARPS * Shape::WARP_ROWS + lane / 4;
    const uint8* stage = copies.shared + Shape::ROWS_AT + from * Shape::ROW_BUFFER;
    const uint8* rows = stage + place * Format::ROW_BYTES;
    const uint8* scales = stage + Shape::SCALES_AT + place * Format::SCALE_BYTES;
#pragma unroll
    for (int i = 0; i < LANE_ROWS; ++i)
      fragments[i] =
          Format::read(rows + 8 * i * Format::ROW_BYTES, scales + 8 * i * Format::SCALE_BYTES, lane / 4, lane % 4, half);
  }
  // One of the words that group `group` of the fragments has in A operands.
  __device__ __forceinline__ void decode(int group, int index) {
    const int row = index / 4, word = index % 4;
    a[group][row / 2][word / 2][word % 2 * 2 + row % 2] = Format::decode(fragments[row], group, word);
  }

  // sums += a stage, in groups of which each half has two. Between the products of a group the next group becomes bf16, and
  // copies begin, one by one, since many at once keep the reads of shared memory waiting: in the first group of the rows of
  // a later stage, to where those of the stage before were, in each half's second of the tokens two halves later, to where
  // those of the half before were. There is a barrier in front of each half's second group: behind it all warps are
  // through with the half before and with the rows of this one, and what was copied before this half's first group is here.
  __device__ __forceinline__ void multiply(Sums& sums) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        const bool is_last = half == HALVES - 1;
        if (group == 1) {
          wait_copies<1>();
          __syncthreads();
          read_rows(is_last ? after(row_buffer, Shape::ROW_BUFFERS) : row_buffer, is_last ? 0 : half + 1);
        }
#pragma unroll
        for (int j = 0; j < TOKEN_TILES; ++j) {
          const uint4 words = b[j % 2];
          const uint32 pairs[2][2] = {{words.x, words.y}, {words.z, words.w}};
          b[j % 2] = j < TOKEN_TILES - 2
                         ? read_tokens(buffer, group, j + 2)
                         : read_tokens(group ? after(buffer, Shape::TOKEN_BUFFERS) : buffer, 1 - group, j + 2 - TOKEN_TILES);
#pragma unroll
          for (int pair = 0; pair < 2; ++pair)
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; ++tile) mma_16x8x16(sums[tile][j], a[group][tile][pair], pairs[pair]);
#pragma unroll
          for (int i = 0; i < 4 * LANE_ROWS; ++i)
            if (i / 4 * (TOKEN_TILES / LANE_ROWS) == j) decode(1 - group, i);
          copy_some(half, group, j);
        }
        commit_copies();
      }
      buffer = after(buffer, Shape::TOKEN_BUFFERS);
    }
    row_buffer = after(row_buffer, Shape::ROW_BUFFERS);
    copies.advance();
  }
  __device__ __forceinline__ void copy_some(int half, int group, int step) const {
#pragma unroll
    for (int i = 0; i < Copies::ROW_PARTS; ++i)
      if (half == 0 && group == 0 && i * TOKEN_TILES / Copies::ROW_PARTS == step)
        copies.copy_rows(i, before(row_buffer, Shape::ROW_BUFFERS));
#pragma unroll
    for (int i = 0; i < Copies::TOKEN_PARTS; ++i)
      if (group == 1 && i * TOKEN_TILES / Copies::TOKEN_PARTS == step)
        copies.copy_tokens(i, half, before(buffer, Shape::TOKEN_BUFFERS));
  }

  // sums += scales * step, for steps of the columns that share a scale, the last of them in stage `at`; clears `step`.
  __device__ __forceinline__ void add_scaled(const Work& now, int at, Sums& sums, Sums& step) const {
    const int first = threadIdx.x / WARP % Shape::ROW_WARPS * Shape::WARP_ROWS;
    float scales[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      scales[i] = Format::sum_scale(problem.scales, problem.columns, problem.weight_row(now, first + i),
                                    at * Shape::STAGE_COLUMNS);
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
    copies.start();
#pragma unroll
    for (int i = 0; i < AHEAD; ++i, copies.advance()) {
#pragma unroll
      for (int part = 0; part < Copies::ROW_PARTS; ++part) copies.copy_rows(part, i);
    }
    start_next();
    wait_for_previous();
    copies.start();
#pragma unroll
    for (int i = 0; i < AHEAD; ++i, copies.advance()) {
#pragma unroll
      for (int part = 0; part < HALVES * Copies::TOKEN_PARTS; ++part)
        copies.copy_tokens(part / HALVES, part % HALVES, i * HALVES + part % HALVES);
    }
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    read_rows(0, 0);
#pragma unroll
    for (int j = 0; j < 2; ++j) b[j] = read_tokens(0, 0, j);
#pragma unroll
    for (int i = 0; i < 4 * LANE_ROWS; ++i) decode(0, i);
    for (int mine = blockIdx.x; mine < problem.count(); mine += gridDim.x) {
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
