// out[T, N] = (x weight^T) alpha of NVFP4 activations and weights by the block-scaled instruction of SM120 and later.
//
// A block multiplies ROWS rows by TOKENS tokens; stages of 128 columns, which are K's multiple, go by cp.async through STAGES
// buffers. Codes of a row in a stage are four pieces of 16 bytes, of which every second row has another order, so that
// eight rows of `load_matrices` meet no bank twice. Tiles of tokens are next to each other in the grid, so that they find
// the rows in L2. A block scale of the weight must not be negative, as none is.
// OUTPUT: bf16 or float.
#include "q4e.cuh"

constexpr int ROW_WARPS = 2, TOKEN_WARPS = 4, THREADS = WARP * ROW_WARPS * TOKEN_WARPS, STAGES = 4, COLUMNS = 128;
constexpr int ROW_TILES = 4, TOKEN_TILES = 4, ROWS = ROW_WARPS * ROW_TILES * 16, TOKENS = TOKEN_WARPS * TOKEN_TILES * 8;
constexpr int PIECES = 4, CODE_BYTES = 16 * PIECES, SCALE_BYTES = COLUMNS / 16;
static_assert(ROWS == 128 && TOKENS == 128 && THREADS == 256, "a thread copies two pieces and the scales of a row or a token");

// A stage of one operand.
struct Stage {
  uint8 codes[128 * CODE_BYTES];
  uint8 scales[128 * SCALE_BYTES];

  static __device__ __forceinline__ int place(int row, int piece) { return row * CODE_BYTES + 16 * (piece ^ row / 2 % 4); }
  // Four matrices of 8 rows by 32 columns, lane 8i + r has row r of matrix i: matrices 1 and 3 or 2 and 3 are the columns
  // behind those of the others.
  __device__ __forceinline__ void load(uint32 (&values)[4], int row, int piece) const {
    load_matrices(values, codes + place(row, piece));
  }
  __device__ __forceinline__ uint32 scales_of(int row, int half) const {
    return *reinterpret_cast<const uint32*>(scales + row * SCALE_BYTES + 4 * half);
  }
};
struct Buffer {
  Stage rows, tokens;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
block_scaled(const uint8* x, const uint8* x_scales, const uint8* weight, const uint8* weight_scales, const float* alpha,
             OUTPUT* out, int tokens, int rows, int columns) {
  DYNAMIC_SHARED(Buffer, buffers);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  const int first_token = blockIdx.x * TOKENS, first_row = blockIdx.y * ROWS, stages = columns / COLUMNS;
  // Of one of the operands: half of a row's codes and half of its scales.
  const int mine = threadIdx.x / 2, part = threadIdx.x % 2;
  const int64 row = min(first_row + mine, rows - 1), token = min(first_token + mine, tokens - 1);
  auto copy = [&](Stage& to, const uint8* codes, const uint8* scales, int64 from, int stage) {
    const uint8* values = codes + (from * columns + stage * COLUMNS) / 2;
#pragma unroll
    for (int i = 0; i < PIECES / 2; ++i)
      copy_async_16(to.codes + Stage::place(mine, 2 * part + i), values + 16 * (2 * part + i));
    copy_async_4(to.scales + mine * SCALE_BYTES + 4 * part, scales + (from * columns + stage * COLUMNS) / 16 + 4 * part);
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i)
    if (i < stages) copy(buffers[i].rows, weight, weight_scales, row, i);
  start_next();
  wait_for_previous();
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (i < stages) copy(buffers[i].tokens, x, x_scales, token, i);
    commit_copies();
  }

  const int warp_row = warp % ROW_WARPS * ROW_TILES * 16, warp_token = warp / ROW_WARPS * TOKEN_TILES * 8;
  float sums[ROW_TILES][TOKEN_TILES][4] = {};
  for (int stage = 0; stage < stages; ++stage) {
    wait_copies<STAGES - 2>();
    __syncthreads();
    const int next = stage + STAGES - 1;
    if (next < stages) {
      copy(buffers[next % STAGES].rows, weight, weight_scales, row, next);
      copy(buffers[next % STAGES].tokens, x, x_scales, token, next);
    }
    commit_copies();
    const Buffer& now = buffers[stage % STAGES];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32 a[ROW_TILES][4], b[TOKEN_TILES / 2][4], scales[TOKEN_TILES];
#pragma unroll
      for (int i = 0; i < ROW_TILES; ++i) now.rows.load(a[i], warp_row + 16 * i + lane % 16, 2 * half + lane / 16);
#pragma unroll
      for (int j = 0; j < TOKEN_TILES / 2; ++j)
        now.tokens.load(b[j], warp_token + 16 * j + lane / 16 * 8 + lane % 8, 2 * half + lane / 8 % 2);
#pragma unroll
      for (int j = 0; j < TOKEN_TILES; ++j) scales[j] = now.tokens.scales_of(warp_token + 8 * j + g, half);
#pragma unroll
      for (int i = 0; i < ROW_TILES; ++i) {
        const uint32 row_scales = now.rows.scales_of(warp_row + 16 * i + t % 2 * 8 + g, half);
#pragma unroll
        for (int j = 0; j < TOKEN_TILES; ++j)
          mma_block_scaled_16x8x64(sums[i][j], a[i], b[j / 2] + j % 2 * 2, row_scales, scales[j]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4 * ROW_TILES; ++i) {
    const int to_row = first_row + warp_row + i / 2 % 2 * 8 + i / 4 * 16 + g;
    if (to_row >= rows) continue;
    const float scale = alpha[to_row];
#pragma unroll
    for (int j = 0; j < TOKEN_TILES; ++j) {
      const int to_token = first_token + warp_token + 8 * j + 2 * t + i % 2;
      if (to_token < tokens) out[int64(to_token) * rows + to_row] = from_float<OUTPUT>(sums[i / 4][j][i % 4] * scale);
    }
  }
}
