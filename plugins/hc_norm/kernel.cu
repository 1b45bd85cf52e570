// Grouped RMSNorm, one block a stream of a token. HIDDEN: elements of a stream; ACTIVATION: bf16 or float.
#include "q4e.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
hc_norm(const ACTIVATION* stack, const float* gain, ACTIVATION* normed, float eps) {
  const int stream = blockIdx.x, token = blockIdx.y;
  const int64 row = (int64(token) * gridDim.x + stream) * HIDDEN;
  wait_for_previous();
  start_next();
  float values[ceil_div(HIDDEN, THREADS)], squares = 0.f;
#pragma unroll
  for (int i = 0; i < ceil_div(HIDDEN, THREADS); ++i) {
    int column = i * THREADS + threadIdx.x;
    values[i] = column < HIDDEN ? to_float(stack[row + column]) : 0.f;
    squares += values[i] * values[i];
  }
  float scale = rsqrtf(block_sum<THREADS>(squares) / HIDDEN + eps);
#pragma unroll
  for (int i = 0; i < ceil_div(HIDDEN, THREADS); ++i) {
    int column = i * THREADS + threadIdx.x;
    if (column < HIDDEN)
      normed[row + column] = from_float<ACTIVATION>(values[i] * scale * gain[stream * HIDDEN + column]);
  }
}
