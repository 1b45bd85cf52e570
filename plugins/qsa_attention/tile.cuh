// A tile of 32 tokens in shared memory as tensor cores take it: a lane finds what it needs at its place in rows of a warp,
// with no conflict of banks. Each warp has the keys of 8 tokens and 64 columns of the values of all, which no other reads.
// Macros: HEAD_DIM (a multiple of 8), HKV, PAGE, CACHE: bf16 or e4m3.
#pragma once
#include "qsa_attention/selection.cuh"

constexpr int WARPS = 4, THREADS = WARPS * WARP;
constexpr int CHUNKS = ceil_div(HEAD_DIM, 32);                  // of a key: 4 lanes with 8 columns each
constexpr int SLABS = ceil_div(ceil_div(HEAD_DIM, 64), WARPS);  // of a value, a warp: 8 lanes with 8 columns each
constexpr int STEPS = TILE / 16;                                // of the product with the values

// Eight neighbouring columns of a key or value.
template <typename T>
struct Chunk;
template <>
struct Chunk<bf16> {
  uint4 bits;
  __device__ __forceinline__ uint32 word(int i) const {
    return i == 0 ? bits.x : i == 1 ? bits.y : i == 2 ? bits.z : bits.w;
  }
  // Columns 2i and 2i + 1, as two bf16.
  __device__ __forceinline__ uint32 columns(int i) const { return word(i); }
  // Column i of this and of `other`.
  __device__ __forceinline__ uint32 column(int i, const Chunk& other) const {
    return __byte_perm(word(i / 2), other.word(i / 2), i % 2 ? 0x7632 : 0x5410);
  }
};
template <>
struct Chunk<e4m3> {
  uint2 bits;
  __device__ __forceinline__ uint32 word(int i) const { return i == 0 ? bits.x : bits.y; }
  __device__ __forceinline__ uint32 columns(int i) const {
    return e4m3_pair_to_bf16(__byte_perm(word(i / 2), 0, i % 2 ? 0x3322 : 0x1100));
  }
  __device__ __forceinline__ uint32 column(int i, const Chunk& other) const {
    return e4m3_pair_to_bf16(__byte_perm(word(i / 4), other.word(i / 4), 0x4400 + 0x1111 * (i % 4)));
  }
};
using Piece = Chunk<CACHE>;

// Two chunks of FP8 that are neighbours in the cache are copied together, if their rows are aligned for it.
constexpr int TOGETHER = sizeof(Piece) == 8 && HEAD_DIM % 16 == 0 ? 2 : 1;
__device__ __forceinline__ void copy_pieces(Piece* to, const CACHE* from, bool valid) {
  if (sizeof(Piece) * TOGETHER == 16)
    copy_async_16(to, from, valid);
  else if (valid)
    copy_async_8(to, from);
  else
    *reinterpret_cast<uint64*>(to) = 0;
}

struct WarpTile {
  Piece keys[CHUNKS][WARP];               // of token lane / 4 of the warp's eight, columns 32 i + 8 (lane % 4)
  Piece values[SLABS][STEPS][4][WARP];  // of tokens 16 step + 2 (lane / 8) + {0, 1, 8, 9}, columns 8 (lane % 8) of a slab

  // `row`: the cache row of the lane's entry; `cache` is that of the key head. Zeros where there is nothing to copy, so that
  // what pages hold behind a sequence's last token (NaN, maybe) cannot get in through 0 * NaN.
  __device__ __forceinline__ void copy_keys(const CACHE* cache, int row) {
    const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    const int key_row = __shfl_sync(FULL_MASK, row, 8 * warp + g);
    const CACHE* from = cache + int64(max(key_row, 0)) * (HKV * HEAD_DIM);
#pragma unroll
    for (int i = 0; i < CHUNKS; i += TOGETHER) {
      const int chunk = i + t % TOGETHER, column = 32 * chunk + 8 * (t - t % TOGETHER);
      if (CHUNKS % TOGETHER == 0 || chunk < CHUNKS)
        copy_pieces(&keys[chunk][4 * g + t - t % TOGETHER], from + column, key_row >= 0 && column < HEAD_DIM);
    }
  }
  __device__ __forceinline__ void copy_values(const CACHE* cache, int row) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, t = lane / 8, g = lane % 8;
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int i = 0; i < 4; i += TOGETHER) {
        const int which = i + g % TOGETHER;
        const int value_row = __shfl_sync(FULL_MASK, row, 16 * step + 2 * t + which % 2 + 8 * (which / 2));
        const CACHE* from = cache + int64(max(value_row, 0) + PAGE) * (HKV * HEAD_DIM);
#pragma unroll
        for (int s = 0; s < SLABS; ++s) {
          const int column = 64 * (s * WARPS + warp) + 8 * (g - g % TOGETHER);
          copy_pieces(&values[s][step][which][lane - g % TOGETHER], from + column, value_row >= 0 && column < HEAD_DIM);
        }
      }
  }
};
