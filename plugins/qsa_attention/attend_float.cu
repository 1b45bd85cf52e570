// `attend` for float32 activations: one query head of a row over every gridDim.y-th tile of its tokens, a warp a token.
// Macros: HEAD_DIM, HQ, HKV, RATIO, PAGE, CACHE: float or e4m3.
#include "qsa_attention/selection.cuh"

constexpr int WARPS = 4, THREADS = WARPS * WARP;
constexpr int ITEMS = ceil_div(HEAD_DIM, WARP);

extern "C" __global__ void __launch_bounds__(THREADS)
attend_float(const float* q, const int* selected_groups, const CACHE* kv_cache, const int* query_start_loc,
             const int* seq_lens, const int* block_table, const int* num_seqs, float* partial_out, float2* partial_sums,
             int num_groups, int batch_size, int max_blocks, float score_scale) {
  __shared__ float warp_out[WARPS][HEAD_DIM], warp_maximum[WARPS], warp_sums[WARPS];
  const int token = blockIdx.x / HQ, head = blockIdx.x % HQ, kv_head = head / (HQ / HKV);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  wait_for_previous();
  start_next();
  const TokenPlace place = locate_token(token, query_start_loc, seq_lens, num_seqs, batch_size);
  if (place.sequence < 0) return;
  TileWalk walk(selected_groups + int64(token) * num_groups, num_groups, blockIdx.y, gridDim.y);
  walk.start(place, block_table, max_blocks);

  float queries[ITEMS], out[ITEMS], maximum = negative_infinity(), sum = 0.f;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int d = i * WARP + lane;
    queries[i] = d < HEAD_DIM ? q[int64(blockIdx.x) * HEAD_DIM + d] * score_scale : 0.f;
    out[i] = 0.f;
  }
  for (; walk.has_tile(); walk.advance()) {
    for (int i = warp; i < TILE; i += WARPS) {
      const int row = __shfl_sync(FULL_MASK, walk.now.row(), i);
      if (row < 0) continue;
      const CACHE* key = kv_cache + (int64(row) * HKV + kv_head) * HEAD_DIM;
      const CACHE* value = key + int64(PAGE) * HKV * HEAD_DIM;
      float product = 0.f;
#pragma unroll
      for (int j = 0; j < ITEMS; ++j) {
        const int d = j * WARP + lane;
        if (d < HEAD_DIM) product += queries[j] * to_float(key[d]);
      }
      const float score = warp_sum(product), best = fmaxf(maximum, score);
      const float correction = exp2f(maximum - best), weight = exp2f(score - best);
      maximum = best;
      sum = sum * correction + weight;
#pragma unroll
      for (int j = 0; j < ITEMS; ++j) {
        const int d = j * WARP + lane;
        if (d < HEAD_DIM) out[j] = out[j] * correction + weight * to_float(value[d]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < ITEMS; ++i)
    if (i * WARP + lane < HEAD_DIM) warp_out[warp][i * WARP + lane] = out[i];
  if (lane == 0) warp_maximum[warp] = maximum, warp_sums[warp] = sum;
  __syncthreads();

  float best = negative_infinity(), weights[WARPS];
  for (int i = 0; i < WARPS; ++i) best = fmaxf(best, warp_maximum[i]);
  const float base = best == negative_infinity() ? 0.f : best;
  sum = 0.f;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) {
    weights[i] = exp2f(warp_maximum[i] - base);
    sum += weights[i] * warp_sums[i];
  }
  const int64 part = int64(blockIdx.x) * gridDim.y + blockIdx.y;
  if (threadIdx.x == 0) partial_sums[part] = {best, sum};
  for (int d = threadIdx.x; d < HEAD_DIM; d += THREADS) {
    float value = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) value += weights[i] * warp_out[i][d];
    partial_out[part * PART_WIDTH + part_place(d)] = value;
  }
}
