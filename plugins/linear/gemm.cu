// out[T, N] = x[T, K] weight^T for many tokens, in tiles of gemm.cuh. Tiles that would not fill a last round of all blocks
// are divided into parts of K.
// FORMAT: of gemm_formats.cuh; OUTPUT: bf16 or float; SCALES_ROWS: whether rows have scales; SHAPE: the numbers of a
// GemmShape; K_HAS_TAIL: whether K is no multiple of STAGE_COLUMNS.
#include "q4e.cuh"
#include "gemm.cuh"
#include "vector.cuh"

using Shape = GemmShape<FORMAT, SHAPE>;

// Where a lane writes the sums of its rows.
struct OutputRows {
  static constexpr int ROWS = Shape::LANE_ROWS;
  OUTPUT* out;  // of the tile's first token and the lane's first row
  int tokens, rows, pitch;  // how many exist from those on
  float scales[ROWS];

  __device__ __forceinline__ void store(int token, const float (&sums)[ROWS]) const {
    if (token >= tokens) return;
    OUTPUT* to = out + int64(token) * pitch;
    float values[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) values[i] = sums[i] * scales[i];
    if (pitch % ROWS == 0) {
      if (rows > 0) store_vector<OUTPUT>(to, values);
    } else {
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
        if (i < rows) to[i] = from_float<OUTPUT>(values[i]);
    }
  }
};

struct Linear {
  using Work = GemmWork;
  static constexpr bool HAS_TAIL = K_HAS_TAIL;
  static constexpr int BAND = 16;  // tiles of tokens that pass a tile of rows together, and find it in L2

  const bf16* x;
  const void *values, *scales;
  const float* row_scales;
  OUTPUT* out;
  float* partial_sums;
  uint32* arrivals;
  int tokens, num_rows, columns, whole_tiles, parts;

  __device__ __forceinline__ int token_tiles() const { return ceil_div(tokens, Shape::TOKENS); }
  __device__ __forceinline__ int row_tiles() const { return ceil_div(num_rows, Shape::ROWS); }
  __device__ __forceinline__ int count() const {
    return whole_tiles + (token_tiles() * row_tiles() - whole_tiles) * parts;
  }
  __device__ __forceinline__ Work locate(int index) const {
    const int stages = ceil_div(columns, Shape::STAGE_COLUMNS), split = max(index - whole_tiles, 0) / parts;
    const bool is_whole = index < whole_tiles;
    const int tile = is_whole ? index : whole_tiles + split, part = is_whole ? 0 : (index - whole_tiles) % parts;
    const int band = tile / (BAND * row_tiles()), place = tile % (BAND * row_tiles());
    const int width = min(BAND, token_tiles() - band * BAND);
    Work work;
    work.first_token = (band * BAND + place % width) * Shape::TOKENS;
    work.first_row = place / width * Shape::ROWS;
    work.split = split, work.part = part, work.parts = is_whole ? 1 : parts;
    work.first_stage = stages * part / work.parts, work.end_stage = stages * (part + 1) / work.parts;
    return work;
  }
  __device__ __forceinline__ uint32 x_row(const Work& work, int token) const { return min(work.first_token + token, tokens - 1); }
  __device__ __forceinline__ uint32 weight_row(const Work& work, int row) const { return min(work.first_row + row, num_rows - 1); }
  __device__ __forceinline__ OutputRows rows(const Work& work, int row) const {
    const int first = work.first_row + row;
    OutputRows rows;
    rows.out = out + int64(work.first_token) * num_rows + first;
    rows.tokens = tokens - work.first_token, rows.rows = num_rows - first, rows.pitch = num_rows;
#pragma unroll
    for (int i = 0; i < Shape::LANE_ROWS; ++i)
      rows.scales[i] = FORMAT::UNIT * (SCALES_ROWS && first + i < num_rows ? row_scales[first + i] : 1.f);
    return rows;
  }
};

extern "C" __global__ void __launch_bounds__(Shape::THREADS, 1)
gemm(const bf16* x, const void* weight, const void* block_scales, const float* row_scales, OUTPUT* out, float* partial_sums,
     uint32* arrivals, int tokens, int rows, int columns, int whole_tiles, int parts) {
  DYNAMIC_SHARED(uint8, shared);
  const Linear problem = {x,        weight, block_scales, row_scales, out,   partial_sums,
                          arrivals, tokens, rows,         columns,    whole_tiles, parts};
  Gemm<Shape, Linear>(problem, shared).run();
}
