// Tiles of weights by way of shared memory: long pieces of rows are copied in the order of memory, many at a time, and read
// in the order of tensor cores. A tile is 8 "low" and 8 "high" rows; the low rows of tiles follow one another, and the high.
#pragma once
#include "moe/tiles.cuh"

// Low or high rows, from `values` and `scales` of element `column` of the first one on.
struct Half {
  const uint8 *values, *scales;
};

template <typename Format>
__device__ __forceinline__ Half half_of(const Weights& weights, int row, int columns, int column = 0) {
  Half half = {static_cast<const uint8*>(weights.values) + value_bytes<Format>(int64(row) * columns + column), nullptr};
  if constexpr (is_same<Format, Nvfp4>)
    half.scales = static_cast<const uint8*>(weights.block_scales) + int64(row) * (columns / 16) + column / 16;
  if constexpr (is_same<Format, Fp8Blocks>)
    half.scales = static_cast<const uint8*>(weights.block_scales) +
                  sizeof(float) * (int64(row / Fp8Blocks::BLOCK) * ceil_div(columns, Fp8Blocks::BLOCK) +
                                   column / Fp8Blocks::BLOCK);
  return half;
}

// K elements of the rows of T tiles, which have COLUMNS. THREADS threads copy it together; each warp may read it all.
template <typename Format, int COLUMNS, int K, int T, int THREADS>
struct Slot {
  static constexpr int ROWS = 8 * T;  // low, and as many high
  static constexpr int STEPS = K / Format::STEP, ROW_BYTES = 64 * STEPS;  // a step is 64 bytes of each row
  static constexpr int PITCH = STEPS % 2 ? ROW_BYTES : ROW_BYTES + 64;    // neighbouring rows in different banks
  static constexpr int SCALE_BYTES =
      is_same<Format, Nvfp4> ? 2 * ROWS * 8 * STEPS : is_same<Format, Fp8Blocks> ? 2 * 16 * ceil_div(STEPS / 2 + 1, 4) : 0;
  static constexpr int BYTES = 2 * ROWS * PITCH + SCALE_BYTES;
  static_assert(K % Format::STEP == 0, "whole steps");

  // From element `first` of the rows on.
  static __device__ __forceinline__ void copy(uint8* slot, const Half& low, const Half& high, int first, int thread) {
    copy_values(slot, low.values, first, thread);
    copy_values(slot + ROWS * PITCH, high.values, first, thread);
    uint8* const scales = slot + 2 * ROWS * PITCH;
    copy_scales(scales, low.scales, first, thread);
    copy_scales(scales + SCALE_BYTES / 2, high.scales, first, thread);
  }

  static __device__ __forceinline__ void copy_values(uint8* to, const uint8* from, int first, int thread) {
    constexpr int PIECES = ROW_BYTES / 16, ROW_BYTES_APART = COLUMNS / Format::STEP * 64;
    from += first / Format::STEP * 64;
    if constexpr (K == COLUMNS && PITCH == ROW_BYTES) {
#pragma unroll
      for (int i = thread; i < ROWS * PIECES; i += THREADS) copy_async_16(to + 16 * i, from + 16 * i);
    } else if constexpr (THREADS % PIECES == 0) {  // always the same piece of a row
      const int row = thread / PIECES, piece = thread % PIECES;
      to += row * PITCH + 16 * piece, from += row * ROW_BYTES_APART + 16 * piece;
#pragma unroll
      for (int more = 0; more < ROWS; more += THREADS / PIECES)
        if (ROWS % (THREADS / PIECES) == 0 || row + more < ROWS)
          copy_async_16(to + more * PITCH, from + more * ROW_BYTES_APART);
    } else {
#pragma unroll
      for (int i = thread; i < ROWS * PIECES; i += THREADS) {
        const int row = i / PIECES, piece = i % PIECES;
        copy_async_16(to + row * PITCH + 16 * piece, from + row * ROW_BYTES_APART + 16 * piece);
      }
    }
  }

  static __device__ __forceinline__ void copy_scales(uint8* to, const uint8* from, int first, int thread) {
    if constexpr (is_same<Format, Nvfp4>) {
      if constexpr (K == COLUMNS) {
#pragma unroll
        for (int i = thread; i < ROWS / 2 * STEPS; i += THREADS) copy_async_16(to + 16 * i, from + 16 * i);
      } else {
#pragma unroll
        for (int i = thread; i < ROWS * STEPS; i += THREADS)
          copy_async_8(to + 8 * i, from + first / 16 + i / STEPS * (COLUMNS / 16) + i % STEPS * 8);
      }
    } else if constexpr (is_same<Format, Fp8Blocks>) {
      constexpr int LAST = (COLUMNS - 1) / Fp8Blocks::BLOCK;
      // One more than whole blocks where the first step is the second of a block.
      for (int i = thread; i <= STEPS / 2; i += THREADS)
        copy_async_4(to + 4 * i, from + 4 * min(first / Fp8Blocks::BLOCK + i, LAST));
    }
  }

  // What this lane multiplies of a tile in a step of those from element `first` on; behind `wait_copies` and a barrier.
  static __device__ __forceinline__ typename Format::Fragment read(const uint8* slot, int tile, int first, int step) {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    typename Format::Fragment fragment;
    const uint8* const scales = slot + 2 * ROWS * PITCH;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 values = *reinterpret_cast<const uint4*>(slot + (ROWS * half + 8 * tile + g) * PITCH + 64 * step + 16 * t);
      if constexpr (is_same<Format, Bf16>) {
        fragment.values[half] = values;
      } else {
        fragment.codes[half] = values;
        if constexpr (is_same<Format, Nvfp4>)
          fragment.scales[half] =
              *reinterpret_cast<const uint16*>(scales + 8 * ((ROWS * half + 8 * tile + g) * STEPS + step) + 2 * t);
        else
          fragment.scales[half] = *reinterpret_cast<const float*>(scales + SCALE_BYTES / 2 * half +
                                                                     (first / Format::STEP % 2 + step) / 2 * 4);
      }
    }
    return fragment;
  }
};

// Products of T tiles with K of the COLUMNS elements of their rows, CHUNK elements a slot, of which there are up to DEPTH.
// THREADS threads share the slots: a block, or a warp.
template <typename Format, int COLUMNS, int K, int CHUNK, int T, int DEPTH, int THREADS>
struct Stages {
  using Place = Slot<Format, COLUMNS, CHUNK, T, THREADS>;
  static_assert(K % CHUNK == 0, "whole chunks");
  static constexpr int CHUNKS = K / CHUNK, SLOTS = DEPTH < CHUNKS ? DEPTH : CHUNKS;
  static constexpr int BYTES = SLOTS * Place::BYTES;

  uint8* slots;
  Weights weights;
  int low, high;      // the first of the low and of the high rows
  int first, thread;  // the first element of K; the number of this thread
  int apart = 0;      // so much further on are the elements of high rows; for FP8 a multiple of its blocks

  __device__ __forceinline__ void start() const {
#pragma unroll
    for (int chunk = 0; chunk < SLOTS; ++chunk) fetch(chunk);
  }

  __device__ __forceinline__ void fetch(int chunk) const {
    if (chunk < CHUNKS)
      Place::copy(slots + chunk % SLOTS * Place::BYTES, half_of<Format>(weights, low, COLUMNS),
                  half_of<Format>(weights, high, COLUMNS, apart), first + chunk * CHUNK, thread);
    commit_copies();
  }

  static __device__ __forceinline__ void barrier() {
    if constexpr (THREADS == WARP)
      __syncwarp();
    else
      __syncthreads();
  }

  // sums[tile][n] = the tile times tokens 8n up to 8n + 8, by this warp the STEPS steps of each chunk from `step` on.
  // `tokens[n]` is the row of token 8n + lane / 4, K elements.
  template <bool ARRANGED, int STEPS, int N>
  __device__ __forceinline__ void multiply(const bf16* const (&tokens)[N], int step, float (&sums)[T][N][4]) const {
    const bf16* x[N];
#pragma unroll
    for (int n = 0; n < N; ++n) x[n] = tokens[n] + step * Format::STEP + threadIdx.x % 4 * (8 * Format::GROUPS);
    constexpr int CHAINS = N == 1 ? 2 : 1;
    float all[T][CHAINS * N][4] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      wait_copies<SLOTS - 1>();
      barrier();
      const uint8* const slot = slots + chunk % SLOTS * Place::BYTES;
#pragma unroll
      for (int i = 0; i < STEPS; ++i) {
        typename Format::Fragment fragments[T];
#pragma unroll
        for (int tile = 0; tile < T; ++tile)
          fragments[tile] = Place::read(slot, tile, first + chunk * CHUNK, step + i);
        multiply_step<Format, ARRANGED, CHAINS>(fragments, x, chunk * CHUNK + i * Format::STEP, all);
      }
      if constexpr (CHUNKS > SLOTS) barrier();
      fetch(chunk + SLOTS);
    }
#pragma unroll
    for (int tile = 0; tile < T; ++tile)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          sums[tile][n][i] = all[tile][n][i] + (CHAINS == 2 ? all[tile][(CHAINS - 1) * N + n][i] : 0.f);
  }
};
