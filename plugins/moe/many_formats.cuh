// Weights of many_tile.cuh, from global memory by way of shared memory to the A operands of mma_16x8x16: tiles of 16 rows by a
// stage of K, in the formats of weight_formats.cuh.
//
// A lane (g = lane / 4, t = lane % 4) multiplies elements t * 8 * GROUPS up to (t + 1) * 8 * GROUPS of each step, in groups
// of 8, of rows g and g + 8. A `TileFormat` has
//   ELEMENTS, STEP, GROUPS  of K: a stage, a step, and the groups of 8 that a lane has of a step
//   BYTES                   of a tile in shared memory
//   row, element            what a lane copies: 16 bytes from this element on of this row of 16
//   COPIES, copied, place   further ones: how many rows of 8 and elements on, and where to
//   Fragment, read, decode  a lane's part of a step, and a group of it as the operands of two mmas
//   arranged                where element i of 8 stands after `Format::arrange`, as activations have to be in memory
// Macro: WARPS of a block.
#pragma once
#include "moe/tiles.cuh"

constexpr int THREADS = WARPS * WARP;

// For lambdas, whose captures would else be in memory where there are many of them.
#define ALWAYS_INLINE __attribute__((always_inline))

template <typename A, typename B>
constexpr bool is_same = false;
template <typename A>
constexpr bool is_same<A, A> = true;

template <typename Format>
struct TileFormat;

// 32 bytes of codes of each row, then 4 of scales of each.
template <>
struct TileFormat<Nvfp4> {
  static constexpr int ELEMENTS = 64, STEP = 64, GROUPS = 2, CODES = 512, BYTES = CODES + 64, COPIES = 1;
  struct Fragment {
    uint2 codes[2];
    uint32 scales[2];
  };
  static __device__ __forceinline__ int row() { return threadIdx.x % WARP / 2; }
  static __device__ __forceinline__ int element() { return threadIdx.x % 2 * 32; }
  static __device__ __forceinline__ constexpr int2 copied(int) { return {0, 0}; }
  static __device__ __forceinline__ int place(int) { return threadIdx.x % WARP * 16; }
  static __device__ __forceinline__ Fragment read(const uint8* tile, int) {
    const int lane = threadIdx.x % WARP;
    Fragment fragment;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      fragment.codes[i] = reinterpret_cast<const uint2*>(tile)[WARP * i + lane];
      fragment.scales[i] = tile[CODES + WARP * i + lane];
    }
    return fragment;
  }
  static __device__ __forceinline__ void decode(const Fragment& fragment, int group, uint32 a[2][4]) {
    uint32 words[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32 scale = nvfp4_scale_pair(fragment.scales[i] * 0x10001u);
      e2m1_words(group ? fragment.codes[i].y : fragment.codes[i].x, words[i]);
#pragma unroll
      for (int w = 0; w < 4; ++w) words[i][w] = multiply_bf16(words[i][w], scale);
    }
    interleave_rows(words, a);
  }
  static __device__ __forceinline__ constexpr int arranged(int i) { return i % 4 * 2 + i / 4; }
};

// 16 bytes a lane of each row and step: 8 rows of a step a copy.
template <int STEP_>
struct WholeVectors {
  static constexpr int STEP = STEP_, GROUPS = STEP / 32, ELEMENTS = 2 * STEP, BYTES = 2048, COPIES = 4;
  static __device__ __forceinline__ int row() { return threadIdx.x % WARP / 4; }
  static __device__ __forceinline__ int element() { return threadIdx.x % 4 * 8 * GROUPS; }
  static __device__ __forceinline__ constexpr int2 copied(int copy) { return {copy % 2, copy / 2 * STEP}; }
  static __device__ __forceinline__ int place(int copy) { return copy * 512 + threadIdx.x % WARP * 16; }
  static __device__ __forceinline__ uint4 read_row(const uint8* tile, int step, int half) {
    return *reinterpret_cast<const uint4*>(tile + place(2 * step + half));
  }
};

template <>
struct TileFormat<Fp8Blocks> : WholeVectors<64> {
  using Fragment = Fp8Blocks::Fragment;
  static __device__ __forceinline__ Fragment read(const uint8* tile, int step) {
    return {{read_row(tile, step, 0), read_row(tile, step, 1)}, {}};
  }
  static __device__ __forceinline__ void decode(const Fragment& fragment, int group, uint32 a[2][4]) {
    Fp8Blocks::decode(fragment, group, a);
  }
  static __device__ __forceinline__ constexpr int arranged(int i) { return i / 4 * 4 + i % 2 * 2 + i / 2 % 2; }
};

template <>
struct TileFormat<Bf16> : WholeVectors<32> {
  using Fragment = Bf16::Fragment;
  static __device__ __forceinline__ Fragment read(const uint8* tile, int step) {
    return {{read_row(tile, step, 0), read_row(tile, step, 1)}};
  }
  static __device__ __forceinline__ void decode(const Fragment& fragment, int group, uint32 a[2][4]) {
    Bf16::decode(fragment, group, a);
  }
  static __device__ __forceinline__ constexpr int arranged(int i) { return i; }
};

// What a warp copies of its M tiles: 8 rows from `first` on and the 8 that are APART further on, of the next tile those
// TILE_ROWS further on. FP8 scales are not copied: all first 8 rows, and all second ones, are of one block of them.
template <typename Format, int COLUMNS, int APART, int M, int TILE_ROWS>
struct WarpRows {
  using Tile = TileFormat<Format>;
  const uint8* values;  // of the lane's row of the first 8
  const uint8* scales;  // NVFP4: of the row whose scales the lane copies; FP8: of all rows
  int first;

  __device__ __forceinline__ WarpRows(const Weights& weights, int first) : first(first) {
    const int lane = threadIdx.x % WARP;
    values = static_cast<const uint8*>(weights.values) + row_bytes(first + Tile::row() / 8 * APART + Tile::row() % 8) +
             value_bytes<Format>(Tile::element());
    scales = static_cast<const uint8*>(weights.block_scales);
    if constexpr (is_same<Format, Nvfp4>)
      scales += int64(first + lane / 16 * TILE_ROWS + lane / 8 % 2 * APART + lane % 8) * (COLUMNS / 16);
  }

  static __device__ __forceinline__ int64 row_bytes(int row) { return value_bytes<Format>(int64(row) * COLUMNS); }

  // On to the rows behind all of the block's warps.
  __device__ __forceinline__ void advance() {
    constexpr int BEHIND = WARPS * M * TILE_ROWS;
    values += row_bytes(BEHIND);
    if constexpr (is_same<Format, Nvfp4>) scales += BEHIND * (COLUMNS / 16);
    first += BEHIND;
  }

  // Starts to fill tile `m` in shared memory with stage `stage`.
  __device__ __forceinline__ void copy(uint8* tile, int m, int stage) const {
#pragma unroll
    for (int i = 0; i < Tile::COPIES; ++i) {
      const int2 on = Tile::copied(i);
      const uint32 offset = value_bytes<Format>(stage * Tile::ELEMENTS + on.y) + m * row_bytes(TILE_ROWS);
      copy_async_16(tile + Tile::place(i), values + offset + on.x * row_bytes(APART));
    }
  }
  // The same of the scales of that tile and the next one.
  __device__ __forceinline__ void copy_scales(uint8* tile, int m, int stage) const {
    if constexpr (is_same<Format, Nvfp4>) {
      const int lane = threadIdx.x % WARP;
      if (m + 1 < M || lane < 16)
        copy_async_4(tile + lane / 16 * Tile::BYTES + Tile::CODES + lane % 16 * 4,
                     scales + uint32(stage * (Tile::ELEMENTS / 16) + m * (TILE_ROWS * (COLUMNS / 16))));
    }
  }
  // Of the 8 rows of a tile and of those APART further on, which hold for all of K in stage `stage`.
  __device__ __forceinline__ void load_scales(int stage, float (&to)[2]) const {
    const uint8* from = scales + scale_bytes<Format>(first / Format::BLOCK * Format::BLOCK, COLUMNS) + stage * sizeof(float);
    to[0] = *reinterpret_cast<const float*>(from);
    to[1] = *reinterpret_cast<const float*>(from + (APART < Format::BLOCK ? 0 : scale_bytes<Format>(APART, COLUMNS)));
  }
};
