// A tile of the thin projections' weight times one stream of up to eight tokens, by tensor cores. The ten warps of a
// block share the columns of the stream; each keeps its part of the weight in registers, loaded before there are
// activations.
// HIDDEN: columns of a stream, whole chunks of 32; STREAMS; ROWS: of the weight; bf16 only.
#pragma once
#include "q4e.cuh"

constexpr int WARPS = 10, THREADS = WARPS * WARP;
constexpr int TILE_ROWS = 16, TILE_TOKENS = 8, TILE = TILE_ROWS * TILE_TOKENS;
constexpr int CHUNK = 32, CHUNKS = HIDDEN / CHUNK, WARP_CHUNKS = ceil_div(CHUNKS, WARPS);
constexpr int WIDTH = STREAMS * HIDDEN, ROW_TILES = ceil_div(ROWS, TILE_ROWS), PADDED_ROWS = ROW_TILES * TILE_ROWS;
static_assert(HIDDEN % CHUNK == 0, "whole chunks");

// Where lane `4 * group + part` of a warp works: its row of the tile (and the one 8 below), its token, and which 8
// columns of each chunk. The 8 columns are consecutive, so that they are one load. The order in which a tensor core
// contracts them differs from the order in memory, alike for weights and activations.
__device__ __forceinline__ int lane_group() { return threadIdx.x % WARP / 4; }
__device__ __forceinline__ int first_column() { return threadIdx.x / WARP * CHUNK + threadIdx.x % 4 * 8; }
// Its chunks are WARPS * CHUNK columns apart.
__device__ __forceinline__ bool has_chunk(int i) {
  return (i + 1) * WARPS <= CHUNKS || i * WARPS + int(threadIdx.x) / WARP < CHUNKS;
}

struct TileWeights {
  uint4 low[WARP_CHUNKS], high[WARP_CHUNKS];  // of rows `group` and `group + 8`
};

__device__ __forceinline__ void load_weights(TileWeights& tile, const bf16* weight, int first_row, int stream) {
  const uint4 zero = make_uint4(0, 0, 0, 0);
  const int row = first_row + lane_group();
  const bf16* from = weight + int64(row) * WIDTH + stream * HIDDEN + first_column();
#pragma unroll
  for (int i = 0; i < WARP_CHUNKS; ++i) {
    tile.low[i] = has_chunk(i) && row < ROWS ? load_streaming(from + i * WARPS * CHUNK) : zero;
    tile.high[i] = has_chunk(i) && row + 8 < ROWS ? load_streaming(from + 8 * WIDTH + i * WARPS * CHUNK) : zero;
  }
}

// The products of this warp's columns with the `activations` of token `group`, in the layout of `mma_16x8x16`.
__device__ __forceinline__ void multiply(const TileWeights& tile, const uint4 (&activations)[WARP_CHUNKS],
                                         float products[4]) {
  float sums[4][4] = {};  // four chains of dependent sums
#pragma unroll
  for (int i = 0; i < WARP_CHUNKS; ++i) {
    const uint4 low = tile.low[i], high = tile.high[i], x = activations[i];
    const uint32 first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
    const uint32 first_x[2] = {x.x, x.y}, second_x[2] = {x.z, x.w};
    mma_16x8x16(sums[i % 2 * 2], first, first_x);
    mma_16x8x16(sums[i % 2 * 2 + 1], second, second_x);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) products[i] = sums[0][i] + sums[1][i] + (sums[2][i] + sums[3][i]);
}

// A warp's sums into its `[TILE_ROWS, TILE_TOKENS]` part of shared memory.
__device__ __forceinline__ void put_sums(float* tile, const float sums[4]) {
  float2* to = reinterpret_cast<float2*>(tile + lane_group() * TILE_TOKENS + threadIdx.x % 4 * 2);
  to[0] = make_float2(sums[0], sums[1]);
  to[8 * TILE_TOKENS / 2] = make_float2(sums[2], sums[3]);
}

// Element `index` of the tile, added up over the warps.
__device__ __forceinline__ float add_warps(const float* tiles, int index) {
  float sum = 0.f;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) sum += tiles[warp * TILE + index];
  return sum;
}
