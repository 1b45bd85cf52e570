// The warps of the scan that compute the outputs, and copy what both kinds of warps need: they have less to do.
#pragma once
#include "gated_delta_rule/scan.cuh"

constexpr int OUTPUT_TILES = SLICE / TILE;
constexpr float TINY = 1e-30f;

__device__ __forceinline__ int output_thread() { return threadIdx.x - STATE_WARPS * WARP; }

// What a thread copies of each chunk, from where.
struct Copies {
  static constexpr int THREADS = ROW_TILES * WARP, KEY_SEGMENTS = KEY_DIM / 8, SEGMENTS = SLICE / 8;
  const uint16* keys;
  const Pairs* solve;
  const float* decays;
  const ACTIVATION *values, *first_values;  // of rows from the thread's first on; of that one
  int left;                                 // rows of the sequence from there on

  __device__ __forceinline__ Copies(const Part& part, const Memory& memory) {
    const int thread = output_thread(), row = part.from * ROWS + thread / SEGMENTS;
    const int column = part.column() + thread % SEGMENTS * 8;
    keys = memory.prepared.keys_of(part.place, part.key_head()) + thread * 8;
    solve = memory.prepared.solve + memory.prepared.triangle_of(part.place, part.head) + thread;
    decays = memory.prepared.decays_of(part.place, part.head) + thread * 4;
    values = memory.conv_out + part.sequence.token(row) * CONV_WIDTH + 2 * KEY_WIDTH + column;
    first_values = values;
    if (row < part.sequence.pending)
      first_values = memory.draft_rows + part.sequence.draft(row) + KEY_WIDTH + column;
    left = part.sequence.rows() - row;
  }

  // Share `n` of KEY_TILES of the next chunk's copies. Together they would fill the queue that all of a multiprocessor's
  // accesses to shared memory go through, so a share is started between products.
  __device__ __forceinline__ void start(Stage& stage, int n) const {
    static_assert(THREADS / SEGMENTS >= DRAFTS, "rows to replay are the first of a thread");
    constexpr int ROUNDS = ROWS * SEGMENTS / THREADS;
    const int thread = output_thread();
    uint16* keys_to = &stage.keys[thread / KEY_SEGMENTS][thread % KEY_SEGMENTS * 8];
    copy_async_16(keys_to + n * (THREADS / KEY_SEGMENTS) * KEY_PITCH, keys + n * THREADS * 8);
    ACTIVATION* values_to = &stage.values[thread / SEGMENTS][thread % SEGMENTS * 8];
#pragma unroll
    for (int i = n; i < ROUNDS; i += KEY_TILES) {
      const int row = i * (THREADS / SEGMENTS);
      copy_async_16(values_to + row * SLICE_PITCH, i ? values + row * CONV_WIDTH : first_values, row < left);
    }
#pragma unroll
    for (int i = n; i < ceil_div(TRIANGLE * WARP, THREADS); i += KEY_TILES)
      if (i * THREADS + thread < TRIANGLE * WARP)
        copy_async_16(&stage.solve[0][0] + thread + i * THREADS, solve + i * THREADS);
    if (n == KEY_TILES - 1 && thread < 2 * ROWS / 4) copy_async_16(&stage.decays[0][0] + thread * 4, decays);
  }
  __device__ __forceinline__ void advance() {
    keys += K_HEADS * ROWS * KEY_DIM, solve += V_HEADS * TRIANGLE * WARP, decays += V_HEADS * 2 * ROWS;
    values += ROWS * CONV_WIDTH, first_values = values, left -= ROWS;
  }
};

// Where a warp finds what it multiplies, and puts 16 rows of outputs: a lane has two of them, 8 apart.
struct Outputs {
  const Tile *queries, *scores;
  uint16* out;
  float* norms;
  int row, pending, rows;  // of the sequence: the lane's first one of the chunk; to replay; all

  __device__ __forceinline__ Outputs(const Part& part, const Memory& memory) {
    const int lane = threadIdx.x % WARP, tile = output_thread() / WARP, place = tile * TILE + lane / 4;
    row = part.from * ROWS + place, pending = part.sequence.pending, rows = part.sequence.rows();
    queries = memory.prepared.queries_of(part.place, part.key_head()) + tile * KEY_TILES * WARP + lane;
    scores = memory.prepared.scores + memory.prepared.triangle_of(part.place, part.head) + triangle(tile, 0) * WARP + lane;
    out = memory.out + part.sequence.token(row) * VALUE_WIDTH + part.column() + lane % 4 * (SLICE / 4);
    norms = memory.norms + ((int64(part.place) * V_HEADS + part.head) * SLICES + part.slice) * ROWS + place;
  }
  // Of a chunk, as for `Copies`.
  __device__ __forceinline__ void load(Tile (&to_queries)[KEY_TILES], Tile (&to_scores)[ROW_TILES]) {
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n) to_queries[n] = queries[n * WARP];
#pragma unroll
    for (int j = 0; j < ROW_TILES; ++j)
      if (j <= output_thread() / WARP) to_scores[j] = scores[j * WARP];
  }
  __device__ __forceinline__ void advance() {
    queries += K_HEADS * ROW_TILES * KEY_TILES * WARP, scores += V_HEADS * TRIANGLE * WARP;
  }

  // Rows over the RMS of their columns here: a lane stores its columns of a row, 8 n + 2 t and the next, side by side.
  __device__ __forceinline__ void store(const float (&sums)[2 * OUTPUT_TILES][4], float unscale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float squares = 0.f;
#pragma unroll
      for (int n = 0; n < 2 * OUTPUT_TILES; ++n)
        squares += sums[n][2 * half] * sums[n][2 * half] + sums[n][2 * half + 1] * sums[n][2 * half + 1];
      squares += __shfl_xor_sync(FULL_MASK, squares, 1);
      squares += __shfl_xor_sync(FULL_MASK, squares, 2);
      const float mean = squares / SLICE + TINY, scale = rsqrtf(mean);
      uint32 words[2 * OUTPUT_TILES];
#pragma unroll
      for (int n = 0; n < 2 * OUTPUT_TILES; ++n)
        words[n] = pack_fp16(sums[n][2 * half] * scale, sums[n][2 * half + 1] * scale);
      if (row + 8 * half < pending || row + 8 * half >= rows) continue;
      auto* to = reinterpret_cast<uint4*>(out + 8 * half * VALUE_WIDTH);
      to[0] = {words[0], words[1], words[2], words[3]};
      to[1] = {words[4], words[5], words[6], words[7]};
      if (threadIdx.x % 4 == 0) norms[8 * half] = mean * scale * unscale;
    }
    row += ROWS, out += ROWS * VALUE_WIDTH, norms += V_HEADS * SLICES * ROWS;
  }
};

// Returns whether the state is finite.
__device__ __forceinline__ bool scan_outputs(Shared& shared, const Memory& memory, float scale) {
  const int lane = threadIdx.x % WARP, tile = output_thread() / WARP, from = shared.part.from, to = shared.part.to;
  const float unscale = 1.f / scale;
  Copies copies(shared.part, memory);
  Outputs outputs(shared.part, memory);
#pragma unroll
  for (int n = 0; n < KEY_TILES; ++n) copies.start(shared.stages[from % 2], n);
  commit_copies();
  Tile queries[KEY_TILES], scores[ROW_TILES] = {};
  outputs.load(queries, scores);
  if (from + 1 < to) copies.advance(), outputs.advance();
  wait_copies<0>();
  arrive_at<NEXT_MAY_COME, BLOCK>();
#pragma unroll 1
  for (int chunk = from; chunk < to; ++chunk) {
    Stage& next = shared.stages[(chunk + 1) % 2];  // behind the last chunk it gets that once more, which costs least
    wait_at<STATE_THERE, BLOCK>();
    float sums[2 * OUTPUT_TILES][4] = {};
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n) {
      copies.start(next, n);
#pragma unroll
      for (int column = 0; column < OUTPUT_TILES; ++column)
        multiply_transposed(sums + 2 * column, queries[n], load_pairs(&shared.state[TILE * column][TILE * n], KEY_PITCH));
    }
    commit_copies();
    if (chunk + 2 < to) copies.advance();
    const float* decays = shared.stages[chunk % 2].decays[0] + tile * TILE + lane / 4;
    const float factors[2] = {decays[0] * rsqrtf(float(KEY_DIM)), decays[8] * rsqrtf(float(KEY_DIM))};
#pragma unroll
    for (int n = 0; n < 2 * OUTPUT_TILES; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] *= factors[i / 2];
    wait_at<DELTAS_THERE, BLOCK>();
#pragma unroll
    for (int j = 0; j < ROW_TILES; ++j) {
      if (j > tile) break;
#pragma unroll
      for (int column = 0; column < OUTPUT_TILES; ++column)
        multiply_transposed(sums + 2 * column, scores[j], load_pairs(&shared.deltas[TILE * column][TILE * j], ROW_PITCH));
    }
    // Not earlier, as a wait for anything else may be a wait for these, which come behind the copies.
    outputs.load(queries, scores);
    if (chunk + 2 < to) outputs.advance();
    wait_copies<0>();
    if (chunk + 1 < to) arrive_at<NEXT_MAY_COME, BLOCK>();
    outputs.store(sums, unscale);
  }
  return !__syncthreads_or(false);
}
