// The thin projections for few tokens: a block for each tile of 16 weight rows and stream. The last of a tile's blocks
// adds up the streams. Macros: those of stream_product.cuh, and TILES: how many tiles of eight tokens fit.
#include "hc_project/outputs.cuh"
#include "hc_project/stream_product.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
hc_project_few_tokens(const bf16* normed, const bf16* weight, bf16* lowrank, bf16* inject, float* partial,
                      uint32* semaphores, int tokens) {
  DYNAMIC_SHARED(float, sums);  // [TILES, WARPS, TILE_ROWS, TILE_TOKENS]
  const int first_row = blockIdx.x * TILE_ROWS, stream = blockIdx.y;
  TileWeights tile;
  load_weights(tile, weight, first_row, stream);
  wait_for_previous();
  start_next();
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const int token = i * TILE_TOKENS + lane_group();
    // Lanes without a token repeat the last one: what they give to the product is not stored.
    const bf16* from = normed + (token < tokens ? token : tokens - 1) * WIDTH + stream * HIDDEN + first_column();
    uint4 activations[WARP_CHUNKS];
#pragma unroll
    for (int j = 0; j < WARP_CHUNKS; ++j)
      activations[j] = has_chunk(j) ? __ldcg(reinterpret_cast<const uint4*>(from + j * WARPS * CHUNK))
                                    : make_uint4(0, 0, 0, 0);
    float products[4];
    multiply(tile, activations, products);
    put_sums(sums + (i * WARPS + threadIdx.x / WARP) * TILE, products);
  }
  __syncthreads();
  float* part = partial + int64(stream) * tokens * PADDED_ROWS;
  for (int i = threadIdx.x; i < TILES * TILE; i += THREADS) {
    const int token = i / TILE * TILE_TOKENS + i % TILE_TOKENS, row = first_row + i % TILE / TILE_TOKENS;
    if (token < tokens) part[int64(token) * PADDED_ROWS + row] = add_warps(sums + i / TILE * WARPS * TILE, i % TILE);
  }
  if (!is_last_block(semaphores + blockIdx.x, STREAMS)) return;
  for (int i = threadIdx.x; i < tokens * TILE_ROWS; i += THREADS) {
    const int64 token = i / TILE_ROWS;
    const int row = first_row + i % TILE_ROWS;
    if (row >= ROWS) continue;
    float sum = 0.f;
#pragma unroll
    for (int s = 0; s < STREAMS; ++s) sum += __ldcg(partial + (s * int64(tokens) + token) * PADDED_ROWS + row);
    store_projection(sum, token, row, ROWS - STREAMS, STREAMS, lowrank, inject);
  }
}
