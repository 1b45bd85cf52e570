// Grouped RMSNorm of the residual stack, alone and behind the pending combine: a block for each stream of a token.
// HIDDEN: elements of a stream; STREAMS; BLOCK_THREADS of a block; ACTIVATION: bf16 or float.
#include "hc_norm/vectors.cuh"

constexpr int VECTOR = vector_of<ACTIVATION>(HIDDEN);
constexpr int ITEMS = ceil_div(HIDDEN / VECTOR, BLOCK_THREADS);

// `stack` plus, with COMBINES, `inject * y`, rounded to the activation dtype and stored in `combined`; normed.
template <bool COMBINES>
__device__ __forceinline__ void norm_stream(const ACTIVATION* stack, const ACTIVATION* y, const ACTIVATION* inject,
                                            const float* gain, ACTIVATION* combined, ACTIVATION* normed, float eps) {
  const int stream = blockIdx.x % STREAMS;
  const int64 token = blockIdx.x / STREAMS, row = int64(blockIdx.x) * HIDDEN;
  start_next();
  float factors[ITEMS][VECTOR], values[ITEMS][VECTOR], update[ITEMS][VECTOR], squares = 0.f;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    int column = (i * BLOCK_THREADS + threadIdx.x) * VECTOR;
    if (column < HIDDEN) load_gain(gain + stream * HIDDEN + column, factors[i]);
  }
  wait_for_previous();
  float weight = COMBINES ? to_float(inject[blockIdx.x]) : 0.f;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    int column = (i * BLOCK_THREADS + threadIdx.x) * VECTOR;
    if (column < HIDDEN) {
      load_floats(stack + row + column, values[i]);
      if (COMBINES) load_floats(y + token * HIDDEN + column, update[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    int column = (i * BLOCK_THREADS + threadIdx.x) * VECTOR;
    if (column >= HIDDEN) break;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      if (COMBINES) values[i][j] = round_to<ACTIVATION>(values[i][j] + weight * update[i][j]);
      squares += values[i][j] * values[i][j];
    }
    if (COMBINES) store_floats(combined + row + column, values[i]);
  }
  float scale = rsqrtf(block_sum<BLOCK_THREADS>(squares) / HIDDEN + eps);
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    int column = (i * BLOCK_THREADS + threadIdx.x) * VECTOR;
    if (column >= HIDDEN) break;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) values[i][j] = values[i][j] * scale * factors[i][j];
    store_floats(normed + row + column, values[i]);
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
hc_norm(const ACTIVATION* stack, const float* gain, ACTIVATION* normed, float eps) {
  norm_stream<false>(stack, nullptr, nullptr, gain, nullptr, normed, eps);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
hc_combine_norm(const ACTIVATION* stack, const ACTIVATION* y, const ACTIVATION* inject, const float* gain,
                ACTIVATION* combined, ACTIVATION* normed, float eps) {
  norm_stream<true>(stack, y, inject, gain, combined, normed, eps);
}
