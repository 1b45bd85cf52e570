// Products of a step of a weight (weight_formats.cuh) with tokens in shared memory, and sums over parts of K.
#pragma once
#include "weight_formats.cuh"

// sums[row tile][token tile] += 16 rows times 8 tokens of a step. `x` is the lane's B operand of group 0 of token tile 0, as
// `arrange` left it; groups are `group_stride` apart, token tiles `tile_stride`. With two CHAINS, as many more sums take
// every second product, so that mmas wait less for each other; their total is wanted. HALVES = 1: 8 rows instead of 16.
template <typename Format, int ROW_TILES, int TILES, int CHAINS, int HALVES = 2>
__device__ __forceinline__ void multiply_step(const typename Format::Fragment (&fragments)[ROW_TILES], const uint4* x,
                                              int group_stride, int tile_stride,
                                              float (&sums)[ROW_TILES][CHAINS * TILES][4]) {
  constexpr int SECOND = (CHAINS - 1) * TILES;
  float step[ROW_TILES][CHAINS * TILES][4] = {};
  float(&to)[ROW_TILES][CHAINS * TILES][4] = Format::HAS_SUM_SCALES ? step : sums;
#pragma unroll
  for (int group = 0; group < Format::GROUPS; ++group) {
    uint32 a[ROW_TILES][2][4];
#pragma unroll
    for (int row = 0; row < ROW_TILES; ++row) Format::template decode<HALVES>(fragments[row], group, a[row]);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const uint4 pairs = x[group * group_stride + tile * tile_stride];
      const uint32 b[2][2] = {{pairs.x, pairs.y}, {pairs.z, pairs.w}};
#pragma unroll
      for (int row = 0; row < ROW_TILES; ++row) {
        mma_16x8x16(to[row][tile], a[row][0], b[0]);
        mma_16x8x16(to[row][SECOND + tile], a[row][1], b[1]);
      }
    }
  }
  if constexpr (Format::HAS_SUM_SCALES) {
#pragma unroll
    for (int row = 0; row < ROW_TILES; ++row)
#pragma unroll
      for (int i = 0; i < CHAINS * TILES; ++i)
#pragma unroll
        for (int j = 0; j < 2 * HALVES; ++j) sums[row][i][j] += fragments[row].scales[j / 2] * step[row][i][j];
  }
}

// Sums over parts of K that several blocks computed, [part, token, row].
struct PartialSums {
  float* sums;
  int tokens, rows, parts;

  __device__ __forceinline__ float* at(int part, int token, int row) const {
    return sums + (int64(part) * tokens + token) * rows + row;
  }
  // The parts in order: the total does not depend on which block came last. Past L1, as other blocks wrote them.
  __device__ __forceinline__ float total(int token, int row) const {
    float total = 0.f;
#pragma unroll 4
    for (int part = 0; part < parts; ++part) total += __ldcg(at(part, token, row));
    return total;
  }
};

// The result of a product, [T, N]: sums times the constant of the format and, if HAS_ROW_SCALES, a scale of each row.
template <typename Format, typename Output, bool HAS_ROW_SCALES>
struct Result {
  Output* out;
  const float* row_scales;
  int rows;

  __device__ __forceinline__ float scale(int row) const {
    return HAS_ROW_SCALES && row < rows ? row_scales[row] * Format::UNIT : Format::UNIT;
  }
  __device__ __forceinline__ void store(int token, int row, float sum, float scale) const {
    out[int64(token) * rows + row] = from_float<Output>(sum * scale);
  }
};
