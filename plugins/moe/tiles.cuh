// Rows of weights times tokens on tensor cores, 16 rows a tile, the weights straight from global memory to registers.
#pragma once
#include "weight_formats.cuh"

// Weights in float32 [N, K], for products without tensor cores.
struct Float32 {
  static __device__ __forceinline__ float value(const void* values, const void*, int columns, int row, int k) {
    return static_cast<const float*>(values)[int64(row) * columns + k];
  }
};

// The matrices of the routed experts, or of the shared one, in one of the formats.
struct Weights {
  const void* values;
  const void* block_scales;     // NVFP4: E4M3; FP8: float32, of blocks of 128 x 128
  const float* global_scales;   // NVFP4: of each matrix
};

__device__ __forceinline__ Weights select(bool first, const Weights& a, const Weights& b) {
  return {first ? a.values : b.values, first ? a.block_scales : b.block_scales,
          first ? a.global_scales : b.global_scales};
}

template <typename Format>
__device__ __forceinline__ int64 value_bytes(int64 elements);
template <>
__device__ __forceinline__ int64 value_bytes<Nvfp4>(int64 elements) { return elements / 2; }
template <>
__device__ __forceinline__ int64 value_bytes<Fp8Blocks>(int64 elements) { return elements; }
template <>
__device__ __forceinline__ int64 value_bytes<Bf16>(int64 elements) { return 2 * elements; }

template <>
__device__ __forceinline__ int64 value_bytes<Float32>(int64 elements) { return 4 * elements; }

template <typename Format>
__device__ __forceinline__ int64 scale_bytes(int, int) { return 0; }
template <>
__device__ __forceinline__ int64 scale_bytes<Nvfp4>(int rows, int columns) { return int64(rows) * (columns / 16); }
template <>
__device__ __forceinline__ int64 scale_bytes<Fp8Blocks>(int rows, int columns) {
  return int64(sizeof(float)) * ceil_div(rows, Fp8Blocks::BLOCK) * ceil_div(columns, Fp8Blocks::BLOCK);
}

// Matrix `index` of those of `rows` x `columns` that `weights` holds. Gate and up are two, and where rows are a
// multiple of the blocks of scales they are one of twice the rows as well.
template <typename Format>
__device__ __forceinline__ Weights matrix(const Weights& weights, int index, int rows, int columns) {
  return {static_cast<const uint8*>(weights.values) + index * value_bytes<Format>(int64(rows) * columns),
          static_cast<const uint8*>(weights.block_scales) + index * scale_bytes<Format>(rows, columns),
          weights.global_scales + index};
}

// What products with matrix `part` (0, or 1 for up) of a `matrix` have to be multiplied by.
template <typename Format>
__device__ __forceinline__ float sum_scale(const Weights&, int) { return Format::UNIT; }
template <>
__device__ __forceinline__ float sum_scale<Nvfp4>(const Weights& weights, int part) {
  return Nvfp4::UNIT * weights.global_scales[part];
}

// The same matrix from row `rows` on. Not for FP8, whose rows share scales.
template <typename Format>
__device__ __forceinline__ Weights behind(const Weights& weights, int rows, int columns) {
  static_assert(!Format::HAS_SUM_SCALES, "rows with scales of their own");
  return {static_cast<const uint8*>(weights.values) + value_bytes<Format>(int64(rows) * columns),
          static_cast<const uint8*>(weights.block_scales) + scale_bytes<Format>(rows, columns), weights.global_scales};
}

// Products of one warp: TILES tiles of 16 rows of COLUMNS elements with groups of 8 tokens, in COUNT steps. The first
// rows of two neighbouring tiles are TILE_ROWS apart. At most AHEAD steps of weights are on their way at a time.
template <typename Format, int COLUMNS, int TILES, int TILE_ROWS, int COUNT, int AHEAD>
struct RowTiles {
  static constexpr int DEPTH = AHEAD < COUNT ? AHEAD : COUNT;
  static_assert(COUNT * Format::STEP <= COLUMNS, "steps of a row");

  typename Format::Rows rows[TILES];
  typename Format::Fragment ring[DEPTH][TILES];
  int first;  // element of K that the lane begins with

  // Starts to read rows `low` and `high` of the first tile, those of this lane, from step `step` on.
  __device__ __forceinline__ RowTiles(const Weights& weights, int low, int high, int step)
      : first(step * Format::STEP + threadIdx.x % 4 * (8 * Format::GROUPS)) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      if constexpr (Format::HAS_SUM_SCALES) {
        const int row = low + tile * TILE_ROWS;
        rows[tile] = Format::locate(weights.values, weights.block_scales, COLUMNS, row, row + (high - low), first);
      } else {  // spelled as a distance of pointers, which needs no registers
        const Weights from = behind<Format>(weights, tile * TILE_ROWS, COLUMNS);
        rows[tile] = Format::locate(from.values, from.block_scales, COLUMNS, low, high, first);
      }
    }
#pragma unroll
    for (int place = 0; place < DEPTH; ++place) fetch(place, place);
  }

  __device__ __forceinline__ void fetch(int place, int step) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) ring[place][tile] = Format::load(rows[tile], step * Format::STEP, true);
  }

  // sums[tile][n] = the tile times tokens 8n up to 8n + 8; `tokens[n]` is the row of token 8n + lane / 4. ARRANGED:
  // rows whose elements are where the format wants them. TURNS: the mmas of a single tile take turns with two sums, so
  // that they wait less for each other.
  template <bool ARRANGED, bool TURNS, int N>
  __device__ __forceinline__ void multiply(const bf16* const (&tokens)[N], float (&sums)[TILES][N][4]) {
    if constexpr (TURNS && TILES * N == 1) {
      float halves[1][2][4];
      accumulate<ARRANGED, 2>(tokens, halves);
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[0][0][i] = halves[0][0][i] + halves[0][1][i];
    } else {
      accumulate<ARRANGED, 1>(tokens, sums);
    }
  }

  template <bool ARRANGED, int CHAINS, int N>
  __device__ __forceinline__ void accumulate(const bf16* const (&tokens)[N], float (&sums)[TILES][CHAINS * N][4]) {
    const bf16* x[N];
#pragma unroll
    for (int n = 0; n < N; ++n) x[n] = tokens[n] + first;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int n = 0; n < CHAINS * N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[tile][n][i] = 0.f;
#pragma unroll 1
    for (int step = 0; step < COUNT; step += DEPTH) {
#pragma unroll
      for (int place = 0; place < DEPTH; ++place) {
        if (COUNT % DEPTH == 0 || step + place < COUNT)
          multiply_step<ARRANGED, CHAINS>(ring[place], x, (step + place) * Format::STEP, sums);
        if (COUNT > DEPTH && step + place + DEPTH < COUNT) fetch(place, step + place + DEPTH);
      }
    }
  }

  template <bool ARRANGED, int CHAINS, int N>
  static __device__ __forceinline__ void multiply_step(const typename Format::Fragment (&fragments)[TILES],
                                                       const bf16* const (&x)[N], int offset,
                                                       float (&sums)[TILES][CHAINS * N][4]) {
    constexpr int SECOND = (CHAINS - 1) * N;
    float step_sums[TILES][CHAINS * N][4] = {};
    float(&to)[TILES][CHAINS * N][4] = Format::HAS_SUM_SCALES ? step_sums : sums;
#pragma unroll
    for (int group = 0; group < Format::GROUPS; ++group) {
      uint4 pairs[N];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        pairs[n] = *reinterpret_cast<const uint4*>(x[n] + offset + 8 * group);
        if constexpr (!ARRANGED) pairs[n] = Format::arrange(pairs[n]);
      }
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        uint32 a[2][4];
        Format::decode(fragments[tile], group, a);
#pragma unroll
        for (int n = 0; n < N; ++n) {
          const uint32 b[2][2] = {{pairs[n].x, pairs[n].y}, {pairs[n].z, pairs[n].w}};
          mma_16x8x16(to[tile][n], a[0], b[0]);
          mma_16x8x16(to[tile][SECOND + n], a[1], b[1]);
        }
      }
    }
    if constexpr (Format::HAS_SUM_SCALES) {
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int n = 0; n < CHAINS * N; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[tile][n][i] += fragments[tile].scales[i / 2] * step_sums[tile][n][i];
    }
  }
};
