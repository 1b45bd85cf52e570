// The warps of the scan that have the state.
#pragma once
#include "gated_delta_rule/scan.cuh"

constexpr float SMALLER = 0x1p-24f, SMALLEST = 0x1p-100f;

// Sums of 16 columns of the state, [16 columns, keys], and what becomes of them.
struct State {
  float sums[2 * KEY_TILES][4];

  // In memory: the lane's first element, and how far element i of sums n is from it.
  __device__ __forceinline__ static int first() { return threadIdx.x % 4 * 2 * VALUE_DIM + threadIdx.x % WARP / 4; }
  __device__ __forceinline__ static constexpr int offset(int n, int i) {
    return (8 * n + i % 2) * VALUE_DIM + i / 2 * 8;
  }
  __device__ __forceinline__ void load(const float* from, float scale) {
    from += first();
#pragma unroll
    for (int n = 0; n < 2 * KEY_TILES; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] = from[offset(n, i)] * scale;
  }
  __device__ __forceinline__ void store(float* to, float scale) const {
    to += first();
#pragma unroll
    for (int n = 0; n < 2 * KEY_TILES; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) to[offset(n, i)] = sums[n][i] * scale;
  }
  __device__ __forceinline__ bool is_finite() const {
    float sum = 0.f;  // of zeros, or NaN
#pragma unroll
    for (int n = 0; n < 2 * KEY_TILES; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum += 0.f * sums[n][i];
    return sum == 0.f;
  }
};

// A tile of sums; also to shared memory, from `to` on.
__device__ __forceinline__ Tile keep_tile(const float (*sums)[4], uint16* to, int pitch) {
  const int lane = threadIdx.x % WARP;
  const Tile packed = pack_tile(sums);
  const uint32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    uint16* row = to + (lane / 4 + word % 2 * 8) * pitch;
    *reinterpret_cast<uint32*>(row + word / 2 * 8 + 2 * (lane % 4)) = words[word];
  }
  return packed;
}

// The factor of the column pair 2t, 2t + 1 of sums n, for each of its four elements.
__device__ __forceinline__ float2 pair_of(const float* factors, int n) {
  return *reinterpret_cast<const float2*>(factors + 8 * n + 2 * (threadIdx.x % 4));
}

// What the values of 16 rows differ by from what the state says, [16 columns, rows]; `reads` is what it says, not decayed.
__device__ __forceinline__ Tile compare_values(float (*reads)[4], const Stage& stage, int row, float scale) {
  const int column = threadIdx.x / WARP * TILE;
  const auto* first = reinterpret_cast<const uint16*>(&stage.values[TILE * row][column]);
  const Tile values = load_tile_transposed(first, SLICE_PITCH);
  const uint32 words[2][2] = {{values.x, values.y}, {values.z, values.w}};
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 decay = pair_of(stage.decays[0], 2 * row + n);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      reads[n][2 * i] = low_bf16(words[n][i]) * scale - decay.x * reads[n][2 * i];
      reads[n][2 * i + 1] = high_bf16(words[n][i]) * scale - decay.y * reads[n][2 * i + 1];
    }
  }
  return pack_tile(reads);
}

// Adds the deltas of 16 rows, [16 columns, rows], to the state, which has decayed to the end of the chunk already.
__device__ __forceinline__ void add_deltas(State& state, float (*deltas)[4], const Stage& stage, int row) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 rest = pair_of(stage.decays[1], 2 * row + n);
#pragma unroll
    for (int i = 0; i < 4; ++i) deltas[n][i] *= i % 2 ? rest.y : rest.x;
  }
  const Tile scaled = pack_tile(deltas);
#pragma unroll
  for (int n = 0; n < KEY_TILES; ++n)
    multiply_transposed(state.sums + 2 * n, scaled, load_pairs_transposed(&stage.keys[TILE * row][TILE * n], KEY_PITCH));
}

// A chunk, with the state in front of it as operands. Rows are taken by twos of tiles and their deltas added a tile late, so
// that tensor cores have other work while a tile's sums go from one product into the next.
__device__ __forceinline__ void advance_chunk(State& state, const Tile (&before)[KEY_TILES], Shared& shared,
                                              const Stage& stage, float scale) {
  const int lane = threadIdx.x % WARP, column = threadIdx.x / WARP * TILE;
  float reads[2 * ROW_TILES][4] = {}, deltas[2 * ROW_TILES][4] = {};
  Tile errors[ROW_TILES];
  const float decay = stage.decays[0][ROWS - 1];
#pragma unroll
  for (int n = 0; n < 2 * KEY_TILES; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) state.sums[n][i] *= decay;
#pragma unroll
  for (int row = 0; row < ROW_TILES; ++row) {
    if (row % 2 == 0) {
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n) {
#pragma unroll
        for (int of_two = row; of_two < row + 2; ++of_two)
          multiply_transposed(reads + 2 * of_two, before[n], load_pairs(&stage.keys[TILE * of_two][TILE * n], KEY_PITCH));
        if (row == 0) __syncwarp();  // else the compiler has the products of one tile wait for each other
      }
    }
    errors[row] = compare_values(reads + 2 * row, stage, row, scale);
#pragma unroll
    for (int j = 0; j <= row; ++j) multiply_transposed(deltas + 2 * row, errors[j], stage.solve[triangle(row, j)][lane]);
    keep_tile(deltas + 2 * row, &shared.deltas[column][TILE * row], ROW_PITCH);
    if (row == ROW_TILES - 1) arrive_at<DELTAS_THERE, BLOCK>();
    if (row > 0) add_deltas(state, deltas + 2 * (row - 1), stage, row - 1);
  }
  add_deltas(state, deltas + 2 * (ROW_TILES - 1), stage, ROW_TILES - 1);
}

// Returns whether the state is finite; if so, or if it is the last attempt, it is stored.
__device__ __forceinline__ bool scan_states(Shared& shared, const Memory& memory, float scale) {
  const Part& part = shared.part;
  const int column = threadIdx.x / WARP * TILE;
  float* recurrent = memory.recurrent_state + (int64(part.sequence.sequence.slot) * V_HEADS + part.head) *
                     (KEY_DIM * VALUE_DIM) + part.slice * SLICE + column;
  State state = {};
  if (part.from > 0 || part.sequence.sequence.context > 0) state.load(recurrent, scale);
#pragma unroll 1
  for (int chunk = part.from; chunk < part.to; ++chunk) {
    Tile before[KEY_TILES];
    wait_at<NEXT_MAY_COME, BLOCK>();
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n)
      before[n] = keep_tile(state.sums + 2 * n, &shared.state[column][TILE * n], KEY_PITCH);
    arrive_at<STATE_THERE, BLOCK>();
    advance_chunk(state, before, shared, shared.stages[chunk % 2], scale);
  }
  const bool finite = !__syncthreads_or(!state.is_finite());
  if (finite || scale < SMALLEST) state.store(recurrent, 1.f / scale);
  return finite;
}
