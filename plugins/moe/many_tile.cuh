// A tile of a product for many tokens: 16 * M rows of a weight a warp, WARPS warps side by side, with up to 8 * N tokens.
//
// Every warp multiplies all the tokens, so a weight is decoded once, in registers, for all of them. Weights go by
// asynchronous copies to memory of the warp that needs them, tokens to memory of the block, DEPTH stages of K on their way
// or in use at once. Tokens are rows in any order; what their 16-bit elements have to be arranged like says
// `TileFormat::arranged`.
#pragma once
#include "moe/many_formats.cuh"

// The tokens of a tile: that of column c begins `offsets[c]` (shared memory) bytes behind `values`.
struct TokenRows {
  const bf16* values;
  const uint32* offsets;
};

// Rows of COLUMNS elements, which ones says `WarpRows`.
template <typename Format, int COLUMNS, int APART, int M, int TILE_ROWS, int N, int DEPTH>
struct TokenTile {
  using Tile = TileFormat<Format>;
  using Rows = WarpRows<Format, COLUMNS, APART, M, TILE_ROWS>;
  static constexpr int STEPS = Tile::ELEMENTS / Tile::STEP, TOKENS = 8 * N;
  static constexpr int PARTS = STEPS * Tile::GROUPS;
  static constexpr int COUNT = COLUMNS / Tile::ELEMENTS;
  static_assert(COLUMNS % Tile::ELEMENTS == 0, "whole stages");
  static constexpr int LINE_BYTES = TOKENS * 128;  // 64 elements of each token
  static constexpr int TOKEN_BYTES = Tile::ELEMENTS / 64 * LINE_BYTES, WARP_BYTES = M * Tile::BYTES;
  static constexpr int STAGE_BYTES = TOKEN_BYTES + WARPS * WARP_BYTES;
  static constexpr int TOGETHER = 2;  // token tiles whose sums wait less for each other

  // Which stage is to be copied next.
  struct Copies {
    Rows rows;
    int stage, parts;  // parts: how many are left

    __device__ __forceinline__ void advance() {
      if (++stage < COUNT) return;
      stage = 0, parts = max(parts - 1, 0);
      rows.advance();
    }
  };

  // Where the 16 bytes from element `k` of 64 on stand in the 128 of a token: pieces that 8 lanes read together are in
  // different banks, and those that 8 lanes copy together in one line.
  static __device__ __forceinline__ int place(int token, int k) {
    constexpr int TURN = Tile::GROUPS == 1 ? 4 : 1;
    return (k / 8 ^ token % 2 * TURN) * 16;
  }

  // Part `part` of PARTS of the copies of a stage, between which a warp multiplies. Neighbouring lanes copy neighbouring 16
  // bytes of a token.
  static __device__ __forceinline__ void copy_part(uint8* slot, int part, const Copies& copies, const TokenRows& tokens) {
    if (copies.parts == 0) return;
    const int stage = copies.stage;
    constexpr int CHUNKS = Tile::ELEMENTS / 8, NEXT = THREADS / CHUNKS, ROUNDS = ceil_div(TOKENS, NEXT);
    const int k = threadIdx.x % CHUNKS * 8;
    const uint8* from = reinterpret_cast<const uint8*>(tokens.values) + uint32(stage * Tile::ELEMENTS + k) * 2u;
    static_assert(NEXT % 2 == 0, "a thread's tokens are all even or all odd");
    uint8* to = slot + k / 64 * LINE_BYTES + place(threadIdx.x / CHUNKS, k % 64);
#pragma unroll
    for (int i = 0; i < ceil_div(ROUNDS, PARTS); ++i) {
      const int token = threadIdx.x / CHUNKS + (i * PARTS + part) * NEXT;
      if (TOKENS % (NEXT * PARTS) == 0 || token < TOKENS) copy_async_16(to + token * 128, from + tokens.offsets[token]);
    }
    uint8* tiles = slot + TOKEN_BYTES + threadIdx.x / WARP * WARP_BYTES;
#pragma unroll
    for (int i = 0; i < ceil_div(M, PARTS); ++i) {
      const int m = i * PARTS + part;
      if (M % PARTS == 0 || m < M) copies.rows.copy(tiles + m * Tile::BYTES, m, stage);
      if (m % 2 == 0 && (M % PARTS == 0 || m < M)) copies.rows.copy_scales(tiles + m * Tile::BYTES, m, stage);
    }
  }

  // sums += a step's product; `x` is the first token's line, in which the step begins at element `first_k`. Calls `copy` for
  // each group.
  template <typename Copy>
  static __device__ __forceinline__ void multiply_step(const typename Tile::Fragment (&fragments)[M], const uint8* x,
                                                       int first_k, float (&sums)[M][N][4], const Copy& copy) {
#pragma unroll
    for (int group = 0; group < Tile::GROUPS; ++group) {
      uint32 a[M][2][4];
#pragma unroll
      for (int m = 0; m < M; ++m) Tile::decode(fragments[m], group, a[m]);
      copy(group);
      const int lane = threadIdx.x % WARP, k = lane % 4 * (8 * Tile::GROUPS) + 8 * group;
      const uint8* own = x + lane / 4 * 128 + place(lane / 4, first_k + k);
#pragma unroll
      for (int first = 0; first < N; first += TOGETHER) {
        uint4 pairs[TOGETHER];
#pragma unroll
        for (int n = first; n < N && n < first + TOGETHER; ++n) 
          pairs[n - first] = *reinterpret_cast<const uint4*>(own + n * 1024);
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

  // sums += a stage's product, and the copies of the stage behind those on their way.
  static __device__ __forceinline__ void multiply_stage(const uint8* slot, uint8* next_slot, int stage, const Rows& rows,
                                                        const Copies& ahead, const TokenRows& tokens,
                                                        float (&sums)[M][N][4]) {
    const uint8* tiles = slot + TOKEN_BYTES + threadIdx.x / WARP * WARP_BYTES;
    float stage_sums[M][N][4] = {};
    float(&to)[M][N][4] = Format::HAS_SUM_SCALES ? stage_sums : sums;
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) {
      typename Tile::Fragment fragments[M];
#pragma unroll
      for (int m = 0; m < M; ++m) fragments[m] = Tile::read(tiles + m * Tile::BYTES, step);
      const int k = step * Tile::STEP;
      multiply_step(fragments, slot + k / 64 * LINE_BYTES, k % 64, to,
                    [&](int group) { copy_part(next_slot, step * Tile::GROUPS + group, ahead, tokens); });
    }
    if constexpr (Format::HAS_SUM_SCALES) {
      static_assert(Tile::ELEMENTS == Format::BLOCK, "a stage has one scale of a row");
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

  // Calls `finish(sums)` for each of `parts` times 16 * M * WARPS rows, one behind the other: sums[m][n] = tile m times
  // tokens 8n up to 8n + 8, as mma_16x8x16 has them. All threads call it; `shared` is in use by the next part meanwhile, and
  // behind the last one free after a barrier.
  template <typename Finish>
  static __device__ __forceinline__ void multiply(uint8* shared, Rows rows, const TokenRows& tokens, int parts,
                                                  const Finish& finish) {
    float sums[M][N][4] = {};
    Copies ahead = {rows, 0, parts};
#pragma unroll
    for (int slot = 0; slot < DEPTH - 1; ++slot) {
      for (int part = 0; part < PARTS; ++part) copy_part(shared + slot * STAGE_BYTES, part, ahead, tokens);
      ahead.advance();
      commit_copies();
    }
    int slot = 0, next_slot = (DEPTH - 1) * STAGE_BYTES, stage = 0;
#pragma unroll 1
    while (parts > 0) {
      wait_copies<DEPTH - 2>();
      __syncthreads();
      multiply_stage(shared + slot, shared + next_slot, stage, rows, ahead, tokens, sums);
      ahead.advance();
      commit_copies();
      slot = slot == (DEPTH - 1) * STAGE_BYTES ? 0 : slot + STAGE_BYTES;
      next_slot = next_slot == (DEPTH - 1) * STAGE_BYTES ? 0 : next_slot + STAGE_BYTES;
      if (++stage < COUNT) continue;
      finish(sums);
      stage = 0, --parts;
      rows.advance();
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.f;
    }
  }
};
