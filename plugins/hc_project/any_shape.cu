// The thin projections for shapes and dtypes that tensor cores do not take: a warp for each row of each token.
// ROWS, WIDTH: of the weight; STREAMS; ACTIVATION: bf16 or float.
#include "hc_project/outputs.cuh"

constexpr int WARPS = 8;

extern "C" __global__ void __launch_bounds__(WARPS * WARP)
hc_project_any_shape(const ACTIVATION* normed, const ACTIVATION* weight, ACTIVATION* lowrank, ACTIVATION* inject) {
  const int64 token = blockIdx.x;
  const int row = blockIdx.y * WARPS + threadIdx.x / WARP;
  start_next();
  wait_for_previous();
  if (row >= ROWS) return;
  float sum = 0.f;
  for (int column = threadIdx.x % WARP; column < WIDTH; column += WARP)
    sum += to_float(normed[token * WIDTH + column]) * to_float(weight[int64(row) * WIDTH + column]);
  sum = warp_sum(sum);
  if (threadIdx.x % WARP == 0) store_projection(sum, token, row, ROWS - STREAMS, STREAMS, lowrank, inject);
}
