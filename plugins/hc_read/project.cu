// A read's first kernel for up to eight tokens: combine and thin projections of one stream by a tile of 16 weight rows.
// Each block combines its whole stream, which costs less than a kernel of its own, and stores its share of it. The norm
// is a factor of a stream: it comes after the product, in the second kernel, for which one of a stream's blocks adds up
// the squares.
// Macros: those of stream_product.cuh, and TOKENS: room for 1, 2, 4 or 8 tokens, more than half of it taken.
#include "hc_norm/vectors.cuh"
#include "hc_project/stream_product.cuh"

constexpr int VECTORS = HIDDEN / 8, ITEMS = ceil_div(VECTORS, THREADS);  // of a token, and for a thread
constexpr int GROUP = TOKENS == 8 ? 4 : TOKENS == 1 ? 1 : 2;             // tokens whose vectors a thread loads at once
constexpr int SCALED_STRIDE = HIDDEN % 64 ? HIDDEN : HIDDEN + 32;        // rows that are read together share no bank

__device__ __forceinline__ bool is_real(int token, int tokens) { return token <= TOKENS / 2 || token < tokens; }

__device__ __forceinline__ uint4 combine(uint4 stack, uint4 y, uint32 weight) {
  return make_uint4(multiply_add_bf16(y.x, weight, stack.x), multiply_add_bf16(y.y, weight, stack.y),
                    multiply_add_bf16(y.z, weight, stack.z), multiply_add_bf16(y.w, weight, stack.w));
}

// Combines the vector at `column` for all tokens: stores it, if `stores`, leaves it times its gain in `scaled`
// `[TOKENS, SCALED_STRIDE]` and adds its squares to `squares`.
__device__ __forceinline__ void combine_vector(const bf16* stack, const bf16* y, const bf16* inject,
                                               const float (&gains)[8], bf16* combined, bf16* scaled, int column,
                                               int tokens, bool stores, float (&squares)[TOKENS]) {
#pragma unroll
  for (int start = 0; start < TOKENS; start += GROUP) {
    uint4 values[GROUP], update[GROUP];
    uint32 weights[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
      const int token = start + i;
      if (!is_real(token, tokens)) break;
      values[i] = __ldcg(reinterpret_cast<const uint4*>(stack + token * WIDTH + column));
      update[i] = __ldcg(reinterpret_cast<const uint4*>(y + token * HIDDEN + column));
      weights[i] = inject[token * STREAMS].bits;
    }
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
      const int token = start + i;
      if (!is_real(token, tokens)) break;
      const uint4 result = combine(values[i], update[i], weights[i] * 0x10001u);
      float floats[8], products[8];
      unpack(result, floats);
#pragma unroll
      for (int j = 0; j < 8; ++j) products[j] = floats[j] * gains[j], squares[token] += floats[j] * floats[j];
      *reinterpret_cast<uint4*>(scaled + token * SCALED_STRIDE + column) = pack(products);
      if (stores) __stcg(reinterpret_cast<uint4*>(combined + token * WIDTH + column), result);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
hc_read_project(const bf16* stack, const bf16* y, const bf16* inject, const float* gain, const bf16* weight,
                bf16* combined, float* partial, float* squares, int tokens) {
  DYNAMIC_SHARED(float, sums);                                  // [WARPS, TILE_ROWS, TILE_TOKENS]
  bf16* scaled = reinterpret_cast<bf16*>(sums + WARPS * TILE);  // [TOKENS, SCALED_STRIDE]: combined * gain
  __shared__ float warp_squares[WARPS * TOKENS];
  const int first_row = blockIdx.x * TILE_ROWS, stream = blockIdx.y, warp = threadIdx.x / WARP;
  const bool adds_squares = blockIdx.x == ROW_TILES - 1;
  float gains[ITEMS][8];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int column = (i * THREADS + threadIdx.x) * 8;
    if (column < HIDDEN) load_gain(gain + stream * HIDDEN + column, gains[i]);
  }
  TileWeights tile;
  load_weights(tile, weight, first_row, stream);
  stack += stream * HIDDEN, combined += stream * HIDDEN, inject += stream;
  wait_for_previous();
  start_next();

  float token_squares[TOKENS] = {};
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int vector = i * THREADS + threadIdx.x;
    if ((i + 1) * THREADS > VECTORS && vector >= VECTORS) break;
    combine_vector(stack, y, inject, gains[i], combined, scaled, vector * 8, tokens, vector % ROW_TILES == blockIdx.x,
                   token_squares);
  }
  if (adds_squares) {
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) {
      const float sum = warp_sum(token_squares[token]);
      if (threadIdx.x % WARP == 0) warp_squares[token * WARPS + warp] = sum;
    }
  }
  __syncthreads();

  uint4 activations[WARP_CHUNKS];
  // Lanes without a token repeat the last one: what they give to the product is not stored.
  const bf16* from = scaled + (lane_group() < TOKENS ? lane_group() : TOKENS - 1) * SCALED_STRIDE + first_column();
#pragma unroll
  for (int i = 0; i < WARP_CHUNKS; ++i)
    activations[i] = has_chunk(i) ? *reinterpret_cast<const uint4*>(from + i * WARPS * CHUNK) : make_uint4(0, 0, 0, 0);
  float products[4];
  multiply(tile, activations, products);
  put_sums(sums + warp * TILE, products);
  __syncthreads();
  const int token = threadIdx.x % TOKENS, row = threadIdx.x / TOKENS;
  if (token >= tokens) return;
  if (row < TILE_ROWS) {
    partial[(stream * tokens + token) * PADDED_ROWS + first_row + row] = add_warps(sums, row * TILE_TOKENS + token);
  } else if (row == TILE_ROWS && adds_squares) {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) total += warp_squares[token * WARPS + i];
    squares[token * STREAMS + stream] = total;
  }
}
