// A tile of a product for many tokens: 16 * M rows of a weight a warp, WARPS warps side by side, with up to 8 * N tokens.
//
// Every warp multiplies all the tokens, so a weight is decoded once, in registers, for all of them. Codes go by
// asynchronous copies to slots of the warp that needs them, tokens to slots of the block, DEPTH stages of K on their way
// or in use at once. Tokens are rows of any order, given by their numbers in shared memory. A format that wants activations
// arranged (weight_formats.cuh) finds them so in memory: `arranged_place` says where an element of 8 stands.
#pragma once
#include "moe/tiles.cuh"

constexpr int WARPS = 4, THREADS = WARPS * WARP;

template <typename A, typename B>
constexpr bool is_same = false;
template <typename A>
constexpr bool is_same<A, A> = true;

// Where element `i` of 8 stands after `Format::arrange`.
template <typename Format>
__device__ __forceinline__ constexpr int arranged_place(int i) { return i; }
template <>
__device__ __forceinline__ constexpr int arranged_place<Nvfp4>(int i) { return i % 4 * 2 + i / 4; }
template <>
__device__ __forceinline__ constexpr int arranged_place<Fp8Blocks>(int i) { return i / 4 * 4 + i % 2 * 2 + i / 2 % 2; }

template <typename Format, int M, int N, int DEPTH>
struct StageSizes {
  static constexpr int ELEMENTS = is_same<Format, Bf16> ? 64 : 128;  // of K
  static constexpr int STEPS = ELEMENTS / Format::STEP, SLICES = ELEMENTS / 32;
  static constexpr int TOKEN_BYTES = ELEMENTS * 8 * N * int(sizeof(bf16));
  static constexpr int WARP_BYTES = STEPS * M * Format::SLOT_BYTES;
  static constexpr int BYTES = TOKEN_BYTES + WARPS * WARP_BYTES;
};

// What a lane loads of a tile's rows: `low` and `high` of the first 16, and TILE_ROWS further on for each other 16.
template <typename Format, int COLUMNS, int M, int TILE_ROWS>
struct LaneRows {
  typename Format::Rows rows[M];

  __device__ __forceinline__ LaneRows(const Weights& weights, int low, int high) {
    const int first = threadIdx.x % 4 * (8 * Format::GROUPS);
#pragma unroll
    for (int m = 0; m < M; ++m) {
      if constexpr (Format::HAS_SUM_SCALES) {
        const int row = low + m * TILE_ROWS;
        rows[m] = Format::locate(weights.values, weights.block_scales, COLUMNS, row, row + (high - low), first);
      } else {
        const Weights from = behind<Format>(weights, m * TILE_ROWS, COLUMNS);
        rows[m] = Format::locate(from.values, from.block_scales, COLUMNS, low, high, first);
      }
    }
  }
};

// The tokens of a tile: rows `rows[column]` (shared memory) of `values`, PITCH elements apart.
template <int PITCH>
struct TokenRows {
  const bf16* values;
  const int* rows;
};

template <typename Format, int COLUMNS, int M, int TILE_ROWS, int N, int DEPTH>
struct TokenTile {
  using Sizes = StageSizes<Format, M, N, DEPTH>;
  static constexpr int COUNT = COLUMNS / Sizes::ELEMENTS, TOKENS = 8 * N;
  static_assert(COLUMNS % Sizes::ELEMENTS == 0, "whole stages");
  static constexpr int TOGETHER = 2;  // token tiles whose sums wait less for each other

  // Of FP8 without scales: gate and up have not the same, which `Format::copy` counts on.
  static __device__ __forceinline__ void copy_weights(uint8* slot, const typename Format::Rows& rows, int offset) {
    if constexpr (Format::HAS_SUM_SCALES)
      Format::template copy_values<2>(slot, rows, offset, true);
    else
      Format::copy(slot, rows, offset, true);
  }

  template <int PITCH>
  static __device__ __forceinline__ void copy_stage(uint8* slot, int stage,
                                                    const LaneRows<Format, COLUMNS, M, TILE_ROWS>& weights,
                                                    const TokenRows<PITCH>& tokens) {
    constexpr int CHUNKS = Sizes::SLICES * 4 * TOKENS;
    uint8* own = slot + Sizes::TOKEN_BYTES + threadIdx.x / WARP * Sizes::WARP_BYTES;
#pragma unroll
    for (int step = 0; step < Sizes::STEPS; ++step)
#pragma unroll
      for (int m = 0; m < M; ++m)
        copy_weights(own + (step * M + m) * Format::SLOT_BYTES, weights.rows[m],
                     stage * Sizes::ELEMENTS + step * Format::STEP);
    // Eight lanes fill 128 bytes in a row; a warp reads whole rows.
    const int t = threadIdx.x % 4, odd = threadIdx.x / 4 % 2;
#pragma unroll
    for (int i = 0; i < ceil_div(CHUNKS, THREADS); ++i) {
      const int pair = (i * THREADS + threadIdx.x) / 8, slice = pair % Sizes::SLICES;
      const int token = pair / Sizes::SLICES * 2 + odd;
      if (CHUNKS % THREADS != 0 && token >= TOKENS) break;
      const int k = stage * Sizes::ELEMENTS + slice / Format::GROUPS * Format::STEP + t * 8 * Format::GROUPS +
                    slice % Format::GROUPS * 8;
      copy_async_16(slot + ((slice * TOKENS + token) * 4 + t) * 16, tokens.values + int64(tokens.rows[token]) * PITCH + k);
    }
  }

  // sums += a step's product; what a lane has of the step's tokens is `x`, slices TOKENS * 4 apart.
  static __device__ __forceinline__ void multiply_step(const typename Format::Fragment (&fragments)[M], const uint4* x,
                                                       float (&sums)[M][N][4]) {
#pragma unroll
    for (int group = 0; group < Format::GROUPS; ++group) {
      uint32 a[M][2][4];
#pragma unroll
      for (int m = 0; m < M; ++m) Format::decode(fragments[m], group, a[m]);
#pragma unroll
      for (int first = 0; first < N; first += TOGETHER) {
        uint4 pairs[TOGETHER];
#pragma unroll
        for (int n = first; n < N && n < first + TOGETHER; ++n) pairs[n - first] = x[(group * TOKENS + 8 * n) * 4];
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int n = first; n < N && n < first + TOGETHER; ++n) {
            const uint4 v = pairs[n - first];
            const uint32 b[2] = {half ? v.z : v.x, half ? v.w : v.y};
#pragma unroll
            for (int m = 0; m < M; ++m) mma_16x8x16(sums[m][n], a[m][half], b);
          }
      }
    }
  }

  static __device__ __forceinline__ void multiply_stage(const uint8* slot, int stage,
                                                        const LaneRows<Format, COLUMNS, M, TILE_ROWS>& weights,
                                                        float (&sums)[M][N][4]) {
    const uint4* x = reinterpret_cast<const uint4*>(slot) + threadIdx.x % WARP;
    const uint8* own = slot + Sizes::TOKEN_BYTES + threadIdx.x / WARP * Sizes::WARP_BYTES;
    float stage_sums[M][N][4] = {};
    float(&to)[M][N][4] = Format::HAS_SUM_SCALES ? stage_sums : sums;
#pragma unroll
    for (int step = 0; step < Sizes::STEPS; ++step) {
      typename Format::Fragment fragments[M];
#pragma unroll
      for (int m = 0; m < M; ++m) fragments[m] = Format::read(own + (step * M + m) * Format::SLOT_BYTES);
      multiply_step(fragments, x + step * Format::GROUPS * TOKENS * 4, to);
    }
    if constexpr (Format::HAS_SUM_SCALES) {
      static_assert(Sizes::ELEMENTS == Format::BLOCK, "a stage has one scale of a row");
#pragma unroll
      for (int m = 0; m < M; ++m) {
        const float scales[2] = {weights.rows[m].scales[0][stage], weights.rows[m].scales[1][stage]};
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[m][n][i] += scales[i / 2] * stage_sums[m][n][i];
      }
    }
  }

  // sums[m][n] = rows of 16-row tile m times tokens 8n up to 8n + 8, as mma_16x8x16 has them. All threads call it, and
  // what is in `shared` may be overwritten behind a barrier.
  template <int PITCH>
  static __device__ __forceinline__ void multiply(uint8* shared, const LaneRows<Format, COLUMNS, M, TILE_ROWS>& weights,
                                                  const TokenRows<PITCH>& tokens, float (&sums)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.f;
#pragma unroll
    for (int stage = 0; stage < DEPTH - 1; ++stage) {
      if (stage < COUNT) copy_stage(shared + stage * Sizes::BYTES, stage, weights, tokens);
      commit_copies();
    }
    int slot = 0, next_slot = (DEPTH - 1) * Sizes::BYTES;
#pragma unroll 1
    for (int stage = 0; stage < COUNT; ++stage) {
      wait_copies<DEPTH - 2>();
      __syncthreads();
      if (stage + DEPTH - 1 < COUNT) copy_stage(shared + next_slot, stage + DEPTH - 1, weights, tokens);
      commit_copies();
      multiply_stage(shared + slot, stage, weights, sums);
      slot = slot + Sizes::BYTES == DEPTH * Sizes::BYTES ? 0 : slot + Sizes::BYTES;
      next_slot = next_slot + Sizes::BYTES == DEPTH * Sizes::BYTES ? 0 : next_slot + Sizes::BYTES;
    }
  }
};
