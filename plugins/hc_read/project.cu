// A read's first kernel for up to eight tokens: combine, norm and thin projections of one stream by a tile of 16 weight
// rows. Each block combines and norms its whole stream, which costs less than a kernel of its own, and stores its share
// of it. Macros: those of stream_product.cuh, and TOKENS: room for 1, 2, 4 or 8 tokens.
#include "hc_norm/vectors.cuh"
#include "hc_project/stream_product.cuh"

constexpr int TOKEN_WARPS = WARPS / TOKENS, TOKEN_THREADS = TOKEN_WARPS * WARP;  // that combine and norm a token
constexpr int VECTORS = HIDDEN / 8, ITEMS = ceil_div(VECTORS, TOKEN_THREADS);
constexpr int NORMED_STRIDE = HIDDEN % 64 ? HIDDEN : HIDDEN + 32;  // rows that are read together share no bank

// `stack + weight * y`, rounded; the squares of what comes out are added to `squares`.
__device__ __forceinline__ uint4 combine(uint4 stack, uint4 y, float weight, float& squares) {
  float values[8], update[8];
  unpack(stack, values), unpack(y, update);
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] += weight * update[i];
  uint4 rounded = pack(values);
  unpack(rounded, values);
#pragma unroll
  for (int i = 0; i < 8; ++i) squares += values[i] * values[i];
  return rounded;
}

__device__ __forceinline__ uint4 scale_by(uint4 stack, float scale, const float* gain) {
  float values[8];
  unpack(stack, values);
  const float4 low = *reinterpret_cast<const float4*>(gain), high = *reinterpret_cast<const float4*>(gain + 4);
  const float factors[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = values[i] * scale * factors[i];
  return pack(values);
}

// Asks for the next kernel's weight, so that memory is never idle between the two. The blocks share it in pieces.
__device__ __forceinline__ void prefetch_up_weight(const bf16* up_weight) {
  constexpr int PIECE = 2048, PIECES = ceil_div(WIDTH * (ROWS - STREAMS), PIECE);  // elements
  const int blocks = gridDim.x * gridDim.y, block = blockIdx.y * gridDim.x + blockIdx.x;
  for (int piece = block + threadIdx.x * blocks; piece < PIECES; piece += THREADS * blocks) {
    const int left = WIDTH * (ROWS - STREAMS) - piece * PIECE;
    prefetch_l2(up_weight + piece * PIECE, 2 * (left < PIECE ? left : PIECE));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
hc_read_project(const bf16* stack, const bf16* y, const bf16* inject, const float* gain, const bf16* weight,
                const bf16* up_weight, bf16* combined, bf16* normed, float* partial, float eps, int tokens) {
  DYNAMIC_SHARED(float, shared);
  float* gains = shared;                                          // [HIDDEN]
  float* sums = gains + HIDDEN;                                   // [WARPS, TILE_ROWS, TILE_TOKENS]
  bf16* normed_rows = reinterpret_cast<bf16*>(sums + WARPS * TILE);  // [TOKENS, NORMED_STRIDE]
  __shared__ float warp_squares[WARPS];
  const int first_row = blockIdx.x * TILE_ROWS, stream = blockIdx.y;
  TileWeights tile;
  load_weights(tile, weight, first_row, stream);
  for (int i = threadIdx.x; i < HIDDEN / 4; i += THREADS) copy_async_16(gains + 4 * i, gain + stream * HIDDEN + 4 * i);
  commit_copies();
  prefetch_up_weight(up_weight);
  wait_for_previous();
  start_next();

  const int token = threadIdx.x / TOKEN_THREADS, first = threadIdx.x % TOKEN_THREADS;
  const int64 row = (int64(token) * STREAMS + stream) * HIDDEN;
  uint4 values[ITEMS], update[ITEMS];
  float amount = 0.f, squares = 0.f;
  if (token < tokens) {
    amount = to_float(inject[token * STREAMS + stream]);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int column = (first + i * TOKEN_THREADS) * 8;
      if (column >= HIDDEN) break;
      values[i] = __ldcg(reinterpret_cast<const uint4*>(stack + row + column));
      update[i] = __ldcg(reinterpret_cast<const uint4*>(y + int64(token) * HIDDEN + column));
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
      if ((first + i * TOKEN_THREADS) * 8 < HIDDEN) values[i] = combine(values[i], update[i], amount, squares);
  }
  squares = warp_sum(squares);
  if (threadIdx.x % WARP == 0) warp_squares[threadIdx.x / WARP] = squares;
  wait_copies<0>();
  __syncthreads();
  if (token < tokens) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < TOKEN_WARPS; ++i) sum += warp_squares[token * TOKEN_WARPS + i];
    const float scale = rsqrtf(sum / HIDDEN + eps);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int vector = first + i * TOKEN_THREADS, column = vector * 8;
      if (column >= HIDDEN) break;
      const uint4 result = scale_by(values[i], scale, gains + column);
      *reinterpret_cast<uint4*>(normed_rows + token * NORMED_STRIDE + column) = result;
      if (vector % gridDim.x == blockIdx.x) {
        *reinterpret_cast<uint4*>(combined + row + column) = values[i];
        *reinterpret_cast<uint4*>(normed + row + column) = result;
      }
    }
  }
  __syncthreads();

  uint4 activations[WARP_CHUNKS];
#pragma unroll
  for (int i = 0; i < WARP_CHUNKS; ++i) {
    activations[i] = make_uint4(0, 0, 0, 0);
    if (lane_group() < tokens && chunk_column(i) < HIDDEN)
      activations[i] = *reinterpret_cast<const uint4*>(normed_rows + lane_group() * NORMED_STRIDE + chunk_column(i));
  }
  float products[4];
  multiply(tile, activations, products);
  put_sums(sums + threadIdx.x / WARP * TILE, products);
  __syncthreads();
  for (int i = threadIdx.x; i < TILE; i += THREADS) {
    const int of = i % TILE_TOKENS;
    if (of < tokens)
      partial[(int64(stream) * tokens + of) * PADDED_ROWS + first_row + i / TILE_TOKENS] = add_warps(sums, i);
  }
}
