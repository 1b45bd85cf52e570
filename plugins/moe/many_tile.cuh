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
  static constexpr int GROUPS = Tile::ELEMENTS / Tile::STEP * Tile::GROUPS, TOKENS = 8 * N;
  static constexpr int COUNT = COLUMNS / Tile::ELEMENTS;
  static_assert(COLUMNS % Tile::ELEMENTS == 0, "whole stages");
  static constexpr int LINE_BYTES = TOKENS * 128;  // 64 elements of each token
  static constexpr int TOKEN_BYTES = Tile::ELEMENTS / 64 * LINE_BYTES, WARP_BYTES = M * Tile::BYTES;
  static constexpr int STAGE_BYTES = TOKEN_BYTES + WARPS * WARP_BYTES;
  static constexpr int TOGETHER = 2;  // token tiles whose sums wait less for each other

  // Where the 16 bytes from element `k` of 64 on stand in the 128 of a token: pieces that 8 lanes read together are in
  // different banks, and those that 8 lanes copy together in one line.
  static __device__ __forceinline__ int place(int token, int k) {
    constexpr int TURN = Tile::GROUPS == 1 ? 4 : 1;
    return (k / 8 ^ token % 2 * TURN) * 16;
  }

  // The copies of a stage: TOKEN_COPIES and M of weights by each thread, and the scales of NVFP4. Neighbouring lanes copy
  // neighbouring 16 bytes of a token.
  static constexpr int CHUNKS = Tile::ELEMENTS / 8, NEXT = THREADS / CHUNKS, TOKEN_COPIES = ceil_div(TOKENS, NEXT);
  static constexpr int COPIES = 2 * M + TOKEN_COPIES;
  struct Copies {
    Rows rows;
    const uint8* tokens;
    uint32 offsets[TOKEN_COPIES];
    int stage, parts;  // parts: how many are left

    __device__ __forceinline__ Copies(const Rows& rows, const TokenRows& from, int parts)
        : rows(rows), tokens(reinterpret_cast<const uint8*>(from.values)), stage(0), parts(parts) {
      static_assert(NEXT % 2 == 0, "a thread's tokens are all even or all odd");
#pragma unroll
      for (int i = 0; i < TOKEN_COPIES; ++i) offsets[i] = from.offsets[min(int(threadIdx.x) / CHUNKS + i * NEXT, TOKENS - 1)];
    }

    // Copy `index` of COPIES.
    __device__ __forceinline__ void start(uint8* slot, int index) const {
      if (parts == 0) return;
      uint8* tiles = slot + TOKEN_BYTES + threadIdx.x / WARP * WARP_BYTES;
      const int m = index / 2, i = index - 2 * M;
      if (i < 0 && index % 2 == 0) rows.copy(tiles + m * Tile::BYTES, m, stage);
      if (i < 0 && index % 4 == 1) rows.copy_scales(tiles + (m & ~1) * Tile::BYTES, m & ~1, stage);
      if (i < 0) return;
      const int k = threadIdx.x % CHUNKS * 8, token = threadIdx.x / CHUNKS + i * NEXT;
      uint8* to = slot + k / 64 * LINE_BYTES + place(threadIdx.x / CHUNKS, k % 64);
      if (TOKENS % NEXT == 0 || token < TOKENS)
        copy_async_16(to + token * 128, tokens + offsets[i] + uint32(stage * Tile::ELEMENTS + k) * 2u);
    }
    __device__ __forceinline__ void advance() {
      if (++stage < COUNT) return;
      stage = 0, parts = max(parts - 1, 0);
      rows.advance();
    }
  };

  // sums += the product of a group of 8 elements a lane, `a`, with the tokens in `slot`; `k` is where its step begins in the
  // stage. Calls `between(index)` PIECES times.
  static constexpr int PIECES = ceil_div(N, TOGETHER);
  template <typename Between>
  static __device__ __forceinline__ void multiply_group(const uint32 (&a)[M][2][4], const uint8* slot, int k, int group,
                                                        float (&sums)[M][N][4], const Between& between) {
    const int lane = threadIdx.x % WARP, own_k = k % 64 + lane % 4 * (8 * Tile::GROUPS) + 8 * group;
    const uint8* own = slot + k / 64 * LINE_BYTES + lane / 4 * 128 + place(lane / 4, own_k);
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
      between(first / TOGETHER);
    }
  }

  // A warp's weights of a step, and the group that is decoded while the one before it is multiplied.
  struct Operands {
    typename Tile::Fragment fragments[M];
    uint32 a[2][M][2][4];

    __device__ __forceinline__ void decode(const uint8* slot, int group) {
      const uint8* tiles = slot + TOKEN_BYTES + threadIdx.x / WARP * WARP_BYTES;
#pragma unroll
      for (int m = 0; m < M; ++m) {
        if (group % Tile::GROUPS == 0) fragments[m] = Tile::read(tiles + m * Tile::BYTES, group / Tile::GROUPS);
        Tile::decode(fragments[m], group % Tile::GROUPS, a[group % 2][m]);
      }
    }
  };

  static __device__ __forceinline__ void add_scaled(const float (&stage_sums)[M][N][4], int stage, const Rows& rows,
                                                    float (&sums)[M][N][4]) {
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

  static __device__ __forceinline__ void clear(float (&sums)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.f;
  }

  // Calls `finish(sums)` for each of `parts` times 16 * M * WARPS rows, one behind the other: sums[m][n] = tile m times
  // tokens 8n up to 8n + 8, as mma_16x8x16 has them. All threads call it; `shared` is in use by the next part meanwhile, and
  // behind the last one free after a barrier.
  //
  // The next stage is awaited in front of the last group of one, so that tensor cores have work while it is decoded. Behind
  // that the copies into the slot before are started, a few at a time.
  template <typename Finish>
  static __device__ __forceinline__ void multiply(uint8* shared, Rows rows, const TokenRows& tokens, int parts,
                                                  const Finish& finish) {
    static_assert(DEPTH >= 3 && GROUPS % 2 == 0, "a stage is in use while the next has come and one is on its way");
    Copies ahead(rows, tokens, parts);
#pragma unroll
    for (int slot = 0; slot < DEPTH - 1; ++slot) {
#pragma unroll
      for (int i = 0; i < COPIES; ++i) ahead.start(shared + slot * STAGE_BYTES, i);
      ahead.advance();
      commit_copies();
    }
    float sums[M][N][4], stage_sums[M][N][4];
    clear(sums);
    Operands operands;
    wait_copies<DEPTH - 2>();
    __syncthreads();
    operands.decode(shared, 0);
    bool has_started = false;
    int slot = 0, free_slot = (DEPTH - 1) * STAGE_BYTES, copied_slot = 0, stage = 0;
#pragma unroll 1
    while (parts > 0) {
      const int next_slot = slot == (DEPTH - 1) * STAGE_BYTES ? 0 : slot + STAGE_BYTES;
      if constexpr (Format::HAS_SUM_SCALES) clear(stage_sums);
#pragma unroll
      for (int group = 0; group < GROUPS; ++group) {
        if (group < GROUPS - 1) {
          operands.decode(shared + slot, group + 1);
        } else {
          if (has_started) {
            ahead.advance();
            commit_copies();
          }
          wait_copies<DEPTH - 3>();
          __syncthreads();
          has_started = true, copied_slot = free_slot;
          operands.decode(shared + next_slot, 0);
        }
        multiply_group(operands.a[group % 2], shared + slot, group / Tile::GROUPS * Tile::STEP, group % Tile::GROUPS,
                       Format::HAS_SUM_SCALES ? stage_sums : sums, [&](int piece) ALWAYS_INLINE {
                         const int index = (group + 1) % GROUPS * PIECES + piece;
#pragma unroll
                         for (int i = 0; i < COPIES; ++i)
                           if (has_started && i * (GROUPS * PIECES) / COPIES == index) ahead.start(shared + copied_slot, i);
                       });
      }
      if constexpr (Format::HAS_SUM_SCALES) add_scaled(stage_sums, stage, rows, sums);
      free_slot = slot;
      slot = next_slot;
      if (++stage < COUNT) continue;
      finish(sums);
      clear(sums);
      stage = 0, --parts;
      rows.advance();
    }
  }
};
