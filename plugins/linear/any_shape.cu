// out[T, N] = x[T, K] weight^T for any shape and for float32 activations, one element at a time: a warp for a row and
// TOKENS tokens. For what the tensor cores cannot take; it need not be fast.
// FORMAT, SCALES_ROWS: as in few_tokens.cu; INPUT and OUTPUT: bf16 or float.
#include "q4e.cuh"
#include "weight_product.cuh"

constexpr int WARPS = 4, TOKENS = 8;

extern "C" __global__ void __launch_bounds__(WARPS * WARP)
any_shape(const INPUT* x, const void* weight, const void* block_scales, const float* row_scales, OUTPUT* out, int tokens,
          int rows, int columns) {
  const int lane = threadIdx.x % WARP, row = blockIdx.x * WARPS + threadIdx.x / WARP;
  wait_for_previous();
  start_next();
  if (row >= rows) return;
  const Result<FORMAT, OUTPUT, SCALES_ROWS> result = {out, row_scales, rows};
  for (int first = blockIdx.y * TOKENS; first < tokens; first += gridDim.y * TOKENS) {
    float sums[TOKENS] = {};
    for (int k = lane; k < columns; k += WARP) {
      const float weight_value = FORMAT::value(weight, block_scales, columns, row, k);
#pragma unroll
      for (int i = 0; i < TOKENS; ++i)
        sums[i] += weight_value * to_float(x[int64(min(first + i, tokens - 1)) * columns + k]);
    }
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
      const float sum = warp_sum(sums[i]);
      if (lane == 0 && first + i < tokens) result.store(first + i, row, sum, result.scale(row) / FORMAT::UNIT);
    }
  }
}
