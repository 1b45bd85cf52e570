// Weights of many_tile.cuh, from global memory by way of shared memory to the A operands of mma_16x8x16: tiles of 16 rows by a
// stage of K, in the formats of weight_formats.cuh.
//
// A lane (g = lane / 4, t = lane % 4) multiplies elements t * 8 * GROUPS up to (t + 1) * 8 * GROUPS of each step, in groups
// of 8, of rows g and g + 8. A `TileFormat` has
//   ELEMENTS, STEP, GROUPS  of K: a stage, a step, and the groups of 8 that a lane has of a step
//   BYTES                   of a tile in shared memory
//   COPIES, source, place   16 bytes each that a lane copies of a row: from which element of the stage, to where
//   Fragment, read, decode  a lane's part of a step, and a group of it as the operands of two mmas
//   arranged                where element i of 8 stands after `Format::arrange`, as activations have to be in memory
#pragma once
#include "moe/tiles.cuh"

constexpr int WARPS = 4, THREADS = WARPS * WARP;

template <typename A, typename B>
constexpr bool is_same = false;
template <typename A>
constexpr bool is_same<A, A> = true;

template <typename Format>
struct TileFormat;

// The second 8 rows are HALF bytes behind the first. Behind the codes are 8 bytes of scales of each row.
template <>
struct TileFormat<Nvfp4> {
  static constexpr int ELEMENTS = 128, STEP = 64, GROUPS = 2, HALF = 512, BYTES = CODE_BYTES + 128, COPIES = 1;
  struct Fragment {
    uint2 codes[2];
    uint32 scales[2];
  };
  static __device__ __forceinline__ int source(int) { return threadIdx.x % 4 * 32; }
  // Two rows a line of 128 bytes, which are turned so that the 8 bytes of 16 lanes are in different banks.
  static __device__ __forceinline__ int place(int, int piece = threadIdx.x % 4) {
    const int g = threadIdx.x % WARP / 4;
    return g / 2 * 128 + (g % 2 * 4 + piece ^ g / 2 % 2 * 2) * 16;
  }
  static __device__ __forceinline__ Fragment read(const uint8* tile, int step) {
    const int lane = threadIdx.x % WARP;
    Fragment fragment;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      fragment.codes[i] = *reinterpret_cast<const uint2*>(tile + HALF * i + place(0, 2 * step + lane % 4 / 2) + lane % 2 * 8);
      fragment.scales[i] = tile[CODE_BYTES + 64 * i + lane / 4 * 8 + step * 4 + lane % 4];
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

// 16 bytes a lane of each row and step.
template <int STEP_>
struct WholeVectors {
  static constexpr int STEP = STEP_, GROUPS = STEP / 32, ELEMENTS = 2 * STEP, HALF = 512, BYTES = 2 * CODE_BYTES, COPIES = 2;
  static __device__ __forceinline__ int source(int copy) { return copy * STEP + threadIdx.x % 4 * 8 * GROUPS; }
  static __device__ __forceinline__ int place(int copy) { return copy * CODE_BYTES + threadIdx.x % WARP * 16; }
  static __device__ __forceinline__ uint4 read_row(const uint8* tile, int step, int half) {
    return *reinterpret_cast<const uint4*>(tile + place(step) + half * HALF);
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
    values = static_cast<const uint8*>(weights.values) + value_bytes<Format>(int64(first + lane / 4) * COLUMNS);
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
      const uint8* from = values + uint32(value_bytes<Format>(stage * Tile::ELEMENTS + Tile::source(i))) +
                          m * uint32(row_bytes(TILE_ROWS));
      copy_async_16(tile + Tile::place(i), from);
      copy_async_16(tile + Tile::place(i) + Tile::HALF, from + row_bytes(APART));
    }
  }
  // The same of the scales of that tile and the next one.
  __device__ __forceinline__ void copy_scales(uint8* tile, int m, int stage) const {
    if constexpr (is_same<Format, Nvfp4>) {
      const int lane = threadIdx.x % WARP;
      if (m + 1 < M || lane < 16)
        copy_async_8(tile + lane / 16 * Tile::BYTES + CODE_BYTES + lane % 16 * 8,
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
