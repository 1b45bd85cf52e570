// Products of many tokens with a weight: persistent blocks that multiply tiles of tokens by tiles of rows.
//
// The warps of a block divide a tile of TOKENS tokens by ROWS rows. Stages of GEMM_K columns go by cp.async through STAGES
// buffers, ahead of the multiplication and across tiles, so that a tile's end overlaps with the start of the next.
// Weights, which become bf16 in registers, are the A operand and activations the B operand of mma_16x8x16. The rows of a warp
// are dealt out so that a lane has the sums of LANE_ROWS neighbours.
//
// What is multiplied says a Problem:
//   Work                     GemmWork, or what is derived from it
//   IS_STATIC                whether `locate` and the weight may be read in front of wait_for_previous
//   count()                  works; block i does i, i + gridDim.x, ...
//   locate(index)            the work
//   x, x_row(work, i)        bf16 [.., columns], and which of its rows is token i of the tile: one that exists
//   values, scales, weight_row(work, i)
//                            the weight [.., columns], and which of its rows is row i of the tile: one that exists. For FP8
//                            the even rows of a warp share the scales of a block, and so do the odd ones
//   columns                  K; a multiple of 8, of 64 for NVFP4, of 16 for FP8
//   HAS_TAIL                 whether it may not be one of 64
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
template <typename Format_, int ROW_WARPS_, int TOKEN_WARPS_, int WARP_ROWS_, int WARP_TOKENS_, int STAGES_>
struct GemmShape {
  using Format = Format_;
  static constexpr int ROW_WARPS = ROW_WARPS_, TOKEN_WARPS = TOKEN_WARPS_, STAGES = STAGES_;
  static constexpr int WARP_ROWS = WARP_ROWS_, WARP_TOKENS = WARP_TOKENS_, LANE_ROWS = WARP_ROWS / 8;
  static constexpr int THREADS = WARP * ROW_WARPS * TOKEN_WARPS;
  static constexpr int ROWS = ROW_WARPS * WARP_ROWS, TOKENS = TOKEN_WARPS * WARP_TOKENS;
  static constexpr int TOKEN_BYTES = 2 * GEMM_K;
  // Stages of tokens, and then of rows, which are all read one stage earlier and so need a buffer less.
  static constexpr int TOKEN_STAGE = TOKENS * TOKEN_BYTES, ROW_STAGE = ROWS * (Format::ROW_BYTES + Format::SCALE_BYTES);
  static constexpr int ROWS_AT = STAGES * TOKEN_STAGE, SCALES_IN = ROWS * Format::ROW_BYTES;
  static constexpr int SHARED_BYTES = ROWS_AT + (STAGES - 1) * ROW_STAGE;
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
  static_assert(Shape::ROWS * PIECES % THREADS == 0 && THREADS % (2 * PIECES) == 0, "whole copies of rows");

  const Problem& problem;
  uint8* shared;
  int index, stage, end_stage, count;
  uint32 token_rows[TOKEN_COPIES], weight_rows[ROW_COPIES], scale_rows[SCALE_COPIES ? SCALE_COPIES : 1];

  // Places 8i + g of a warp are row i of lane g.
  static __device__ __forceinline__ int row_in_place(int place) {
    const int in_warp = place % Shape::WARP_ROWS;
    return place - in_warp + in_warp % 8 * Shape::LANE_ROWS + in_warp / 8;
  }

  __device__ __forceinline__ void start() {
    index = blockIdx.x, count = problem.count();
    locate();
  }
  __device__ __forceinline__ void advance() {
    if (++stage < end_stage) return;
    if (index + int(gridDim.x) >= count) {  // nobody reads what is copied from here on
      --stage;
    } else {
      index += gridDim.x;
      locate();
    }
  }
  __device__ __forceinline__ void locate() {
    const typename Problem::Work work = problem.locate(index);
    stage = work.first_stage, end_stage = work.end_stage;
#pragma unroll
    for (int i = 0; i < TOKEN_COPIES; ++i)
      token_rows[i] = problem.x_row(work, threadIdx.x / TOKEN_PIECES + i * (THREADS / TOKEN_PIECES));
#pragma unroll
    for (int i = 0; i < ROW_COPIES; ++i)
      weight_rows[i] = problem.weight_row(work, row_in_place(threadIdx.x / PIECES + i * (THREADS / PIECES)));
#pragma unroll
    for (int i = 0; i < SCALE_COPIES; ++i)
      scale_rows[i] = problem.weight_row(work, row_in_place((threadIdx.x + i * THREADS) % Shape::ROWS));
  }

  // Part `i` of ROW_PARTS of the rows of the stage, and of TOKEN_PARTS of its tokens.
  __device__ __forceinline__ void copy_rows(int i, int buffer) const {
    constexpr int COLUMNS = GEMM_K / PIECES;  // of 16 bytes
    uint8* to = shared + Shape::ROWS_AT + buffer * Shape::ROW_STAGE;
    if (i < ROW_COPIES) {
      const int piece = threadIdx.x % PIECES, place = threadIdx.x / PIECES;
      copy_16(to + (place + i * (THREADS / PIECES)) * Format::ROW_BYTES + Format::place(place, piece), problem.values,
              stage * PIECES + piece, uint32(problem.columns) / COLUMNS, weight_rows[i]);
    } else {
      static_assert(Format::SCALE_BYTES % 4 == 0, "copies of 4 bytes for a row");
      const int place = threadIdx.x + (i - ROW_COPIES) * THREADS;
      if (Shape::ROWS % THREADS == 0 || place < Shape::ROWS)
        copy_async_4(to + Shape::SCALES_IN + 4 * place,
                     static_cast<const uint32*>(problem.scales) + stage +
                         uint64(scale_rows[i - ROW_COPIES]) * (uint32(problem.columns) / GEMM_K));
    }
  }
  __device__ __forceinline__ void copy_tokens(int i, int buffer) const {
    const int piece = threadIdx.x % TOKEN_PIECES, token = threadIdx.x / TOKEN_PIECES;
    uint8* to = shared + buffer * Shape::TOKEN_STAGE + token * Shape::TOKEN_BYTES + 16 * (piece ^ token % 2);
    copy_16(to + i * (THREADS / TOKEN_PIECES) * Shape::TOKEN_BYTES, problem.x, stage * TOKEN_PIECES + piece,
            uint32(problem.columns) / 8, token_rows[i]);
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
  static constexpr int THREADS = Shape::THREADS, STAGES = Shape::STAGES, LANE_ROWS = Shape::LANE_ROWS;
  static constexpr int TOKEN_TILES = Shape::WARP_TOKENS / 8, ROW_TILES = Shape::WARP_ROWS / 16;
  static_assert(TOKEN_TILES % 2 == 0, "tokens are read two tiles ahead");
  static constexpr int STAGES_OF_SCALE = 128 / GEMM_K;
  using Sums = float[ROW_TILES][TOKEN_TILES][4];

  const Problem& problem;
  Copies copies;
  int buffer, row_buffer;  // of the stage that is multiplied
  // What this lane multiplies: its rows as they are stored, both groups of them in bf16, and the next tokens.
  typename Format::Fragment fragments[LANE_ROWS];
  uint32 a[2][ROW_TILES][2][4];
  uint4 b[2];

  __device__ __forceinline__ Gemm(const Problem& problem, uint8* shared)
      : problem(problem), copies{problem, shared}, buffer(0), row_buffer(0) {}

  __device__ __forceinline__ int next_buffer() const { return buffer == STAGES - 1 ? 0 : buffer + 1; }
  __device__ __forceinline__ int next_row_buffer() const { return row_buffer == STAGES - 2 ? 0 : row_buffer + 1; }
  __device__ __forceinline__ uint4 read_tokens(int from, int group, int tile) const {
    const int lane = threadIdx.x % WARP, first = threadIdx.x / WARP / Shape::ROW_WARPS * Shape::WARP_TOKENS;
    const uint8* tokens = copies.shared + from * Shape::TOKEN_STAGE + (first + lane / 4) * Shape::TOKEN_BYTES;
    const int piece = (2 * (lane % 4) + group) ^ lane / 4 % 2;
    return *reinterpret_cast<const uint4*>(tokens + 8 * tile * Shape::TOKEN_BYTES + 16 * piece);
  }
  __device__ __forceinline__ void read_rows(int from) {
    const int lane = threadIdx.x % WARP, place = threadIdx.x / WARP % Shape::ROW_WARPS * Shape::WARP_ROWS + lane / 4;
    const uint8* stage = copies.shared + Shape::ROWS_AT + from * Shape::ROW_STAGE;
    const uint8* rows = stage + place * Format::ROW_BYTES;
    const uint8* scales = stage + Shape::SCALES_IN + place * Format::SCALE_BYTES;
#pragma unroll
    for (int i = 0; i < LANE_ROWS; ++i)
      fragments[i] =
          Format::read(rows + 8 * i * Format::ROW_BYTES, scales + 8 * i * Format::SCALE_BYTES, lane / 4 % 2, lane % 4);
  }
  // One of the words that group `group` of the fragments has in A operands.
  __device__ __forceinline__ void decode(int group, int index) {
    const int row = index / 4, word = index % 4;
    a[group][row / 2][word / 2][word % 2 * 2 + row % 2] = Format::decode(fragments[row], group, word);
  }

  // sums += a stage. Between the products of each group the next group becomes bf16, and copies of a later stage begin,
  // one by one, since many at once keep the reads of shared memory waiting: in the second group of its rows, to where those
  // of this stage were, in the next stage's first group of its tokens, to where those of the stage before were.
  __device__ __forceinline__ void multiply(Sums& sums) {
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      if (group == 1) {
        commit_copies();
        copies.advance();
        wait_copies<STAGES - 3>();
        __syncthreads();
        read_rows(next_row_buffer());
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
        copy_some(group, j);
      }
    }
    buffer = next_buffer(), row_buffer = next_row_buffer();
  }
  __device__ __forceinline__ void copy_some(int group, int step) const {
    const int to = buffer < 2 ? buffer + STAGES - 2 : buffer - 2;
#pragma unroll
    for (int i = 0; i < Copies::TOKEN_PARTS; ++i)
      if (group == 0 && i * TOKEN_TILES / Copies::TOKEN_PARTS == step) copies.copy_tokens(i, to);
#pragma unroll
    for (int i = 0; i < Copies::ROW_PARTS; ++i)
      if (group == 1 && i * TOKEN_TILES / Copies::ROW_PARTS == step) copies.copy_rows(i, row_buffer);
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

  __device__ __forceinline__ void copy_all_rows(int to) const {
#pragma unroll
    for (int part = 0; part < Copies::ROW_PARTS; ++part) copies.copy_rows(part, to);
  }
  __device__ __forceinline__ void run() {
    if constexpr (Problem::IS_STATIC) {
      copies.start();
#pragma unroll 1
      for (int i = 0; i < STAGES - 1; ++i, copies.advance()) copy_all_rows(i);
    }
    start_next();
    wait_for_previous();
    if (int(blockIdx.x) >= problem.count()) return;
    copies.start();
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) {
      if constexpr (!Problem::IS_STATIC) copy_all_rows(i);
      if (i == STAGES - 2) break;  // its tokens are copied in the first stage
#pragma unroll
      for (int part = 0; part < Copies::TOKEN_PARTS; ++part) copies.copy_tokens(part, i);
      commit_copies();
      copies.advance();
    }
    wait_copies<STAGES - 3>();
    __syncthreads();
    read_rows(0);
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
