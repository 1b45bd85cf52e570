// A tile of a product for many tokens: 16 * M rows of a weight a warp, WARPS warps side by side, with up to 8 * N tokens.
//
// Every warp multiplies all the tokens, so a weight is decoded once, in registers, for all of them. Codes go by
// asynchronous copies to slots of the warp that needs them, tokens to slots of the block, DEPTH stages of K on their way
// or in use at once. Tokens are rows of any order. A format that wants activations
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

// What a warp reads of its M tiles of 16 rows: 8 rows from `first` on and the 8 that are APART further on, of the next tile
// those TILE_ROWS further on.
template <typename Format, int COLUMNS, int APART, int M, int TILE_ROWS>
struct WarpRows {
  static constexpr int SLOT = Format::SLOT_BYTES;
  const uint8* values;  // of the lane's row of the first 8
  const uint8* scales;  // NVFP4: of the row whose scales the lane copies; FP8: of the first row

  __device__ __forceinline__ WarpRows(const Weights& weights, int first) {
    const int lane = threadIdx.x % WARP, k = lane % 4 * (8 * Format::GROUPS);
    values = static_cast<const uint8*>(weights.values) + value_bytes<Format>(int64(first + lane / 4) * COLUMNS + k);
    scales = static_cast<const uint8*>(weights.block_scales);
    if constexpr (is_same<Format, Nvfp4>)
      scales += int64(first + lane / 16 * TILE_ROWS + lane / 8 % 2 * APART + lane % 8) * (COLUMNS / 16);
    if constexpr (is_same<Format, Fp8Blocks>)
      scales += scale_bytes<Format>(first / Format::BLOCK * Format::BLOCK, COLUMNS);
  }

  // Starts to fill the tiles' slots (weight_formats.cuh) with a step from element `k` on. FP8 scales stay where they are.
  __device__ __forceinline__ void copy(uint8* slots, uint32 k) const {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const uint8* from = values + uint32(value_bytes<Format>(k));
      copy_async_16(slots + m * SLOT + 16 * lane, from + value_bytes<Format>(int64(m * TILE_ROWS) * COLUMNS));
      copy_async_16(slots + m * SLOT + 16 * lane + 512, from + value_bytes<Format>(int64(m * TILE_ROWS + APART) * COLUMNS));
    }
    if constexpr (is_same<Format, Nvfp4>) {  // 8 bytes of a row, of two tiles a round
      uint8* to = slots + lane / 16 * SLOT + CODE_BYTES + lane % 16 * 8;
#pragma unroll
      for (int m = 0; m < M; m += 2)
        if (m + 1 < M || lane < 16) copy_async_8(to + m * SLOT, scales + k / 16 + m * TILE_ROWS * (COLUMNS / 16));
    }
  }
  // Of the 8 rows of a tile and of those APART further on, which hold for all of K in stage `stage`.
  __device__ __forceinline__ void load_scales(int stage, float (&to)[2]) const {
    const uint8* from = scales + stage * sizeof(float);
    to[0] = *reinterpret_cast<const float*>(from);
    to[1] = *reinterpret_cast<const float*>(from + (APART < Format::BLOCK ? 0 : scale_bytes<Format>(APART, COLUMNS)));
  }
};

// The tokens of a tile: that of column c begins `offsets[c]` (shared memory) bytes behind `values`.
struct TokenRows {
  const bf16* values;
  const uint32* offsets;
};

// Rows of COLUMNS elements; the first rows of two neighbouring tiles of 16 are TILE_ROWS apart, and all of a block's rows
// that are `low`, and all that are `high`, of the same blocks of FP8 scales.
template <typename Format, int COLUMNS, int APART, int M, int TILE_ROWS, int N, int DEPTH>
struct TokenTile {
  using Rows = WarpRows<Format, COLUMNS, APART, M, TILE_ROWS>;
  using Sizes = StageSizes<Format, M, N, DEPTH>;
  static constexpr int COUNT = COLUMNS / Sizes::ELEMENTS, TOKENS = 8 * N;
  static_assert(COLUMNS % Sizes::ELEMENTS == 0, "whole stages");
  static constexpr int TOGETHER = 2;  // token tiles whose sums wait less for each other

  static __device__ __forceinline__ void copy_stage(uint8* slot, int stage, const Rows& rows,
                                                    const TokenRows& tokens) {
    constexpr int STEP = THREADS / (4 * Sizes::SLICES), ROUNDS = ceil_div(TOKENS, STEP);  // from token to token of a thread
    // Eight lanes fill 128 bytes in a row; a warp reads whole rows.
    const int t = threadIdx.x % 4, slice = threadIdx.x / 8 % Sizes::SLICES;
    const int first = threadIdx.x / (8 * Sizes::SLICES) * 2 + threadIdx.x / 4 % 2;
    uint32 offsets[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i)
      if (TOKENS % STEP == 0 || first + i * STEP < TOKENS) offsets[i] = tokens.offsets[first + i * STEP];
    uint8* own = slot + Sizes::TOKEN_BYTES + threadIdx.x / WARP * Sizes::WARP_BYTES;
#pragma unroll
    for (int step = 0; step < Sizes::STEPS; ++step)
      rows.copy(own + step * M * Format::SLOT_BYTES, stage * Sizes::ELEMENTS + step * Format::STEP);
    const int k = stage * Sizes::ELEMENTS + slice / Format::GROUPS * Format::STEP + t * 8 * Format::GROUPS +
                  slice % Format::GROUPS * 8;
    const uint8* from = reinterpret_cast<const uint8*>(tokens.values) + uint32(k) * uint32(sizeof(bf16));
    uint8* to = slot + ((slice * TOKENS + first) * 4 + t) * 16;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i)
      if (TOKENS % STEP == 0 || first + i * STEP < TOKENS) copy_async_16(to + i * STEP * 64, from + offsets[i]);
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
                                                        const Rows& rows, float (&sums)[M][N][4]) {
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
      float scales[2];
      rows.load_scales(stage, scales);
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[m][n][i] += scales[i / 2] * stage_sums[m][n][i];
    }
  }

  // sums[m][n] = rows of 16-row tile m times tokens 8n up to 8n + 8, as mma_16x8x16 has them. All threads call it, and
  // what is in `shared` may be overwritten behind a barrier.
  static __device__ __forceinline__ void multiply(uint8* shared, const Rows& rows,
                                                  const TokenRows& tokens, float (&sums)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.f;
#pragma unroll
    for (int stage = 0; stage < DEPTH - 1; ++stage) {
      if (stage < COUNT) copy_stage(shared + stage * Sizes::BYTES, stage, rows, tokens);
      commit_copies();
    }
    int slot = 0, next_slot = (DEPTH - 1) * Sizes::BYTES;
#pragma unroll 1
    for (int stage = 0; stage < COUNT; ++stage) {
      wait_copies<DEPTH - 2>();
      __syncthreads();
      if (stage + DEPTH - 1 < COUNT) copy_stage(shared + next_slot, stage + DEPTH - 1, rows, tokens);
      commit_copies();
      multiply_stage(shared + slot, stage, rows, sums);
      slot = slot + Sizes::BYTES == DEPTH * Sizes::BYTES ? 0 : slot + Sizes::BYTES;
      next_slot = next_slot + Sizes::BYTES == DEPTH * Sizes::BYTES ? 0 : next_slot + Sizes::BYTES;
    }
  }
};
