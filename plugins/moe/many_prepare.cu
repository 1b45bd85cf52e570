// What the products for many tokens need of x: the logit of the shared expert's gate and, for formats that want it, the
// row as they arrange it. A warp a token. HIDDEN: a multiple of 8; EXPERTS, CHOICES; ARRANGED: the format, or Bf16.
#include "moe/many_tile.cuh"
#include "moe/routing.cuh"

__device__ __forceinline__ float dot(uint4 a, uint4 b) {
  const uint32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) sum += low_bf16(x[i]) * low_bf16(y[i]) + high_bf16(x[i]) * high_bf16(y[i]);
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
many_prepare(const uint4* x, const uint4* shared_gate, float* logits, uint4* arranged, int first_token, int tokens) {
  constexpr int CHUNKS = HIDDEN / 8, ROUNDS = ceil_div(CHUNKS, WARP);
  const int token = blockIdx.x * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
  wait_for_previous();
  start_next();
  if (token >= tokens) return;
  x += int64(first_token + token) * CHUNKS, arranged += int64(token) * CHUNKS;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    const int chunk = i * WARP + lane;
    if (CHUNKS % WARP != 0 && chunk >= CHUNKS) break;
    const uint4 mine = x[chunk];
    sum += dot(mine, shared_gate[chunk]);
    if constexpr (!is_same<ARRANGED, Bf16>) arranged[chunk] = ARRANGED::arrange(mine);
  }
  sum = warp_sum(sum);
  if (lane == 0) logits[int64(token) * LOGITS_PITCH + EXPERTS] = sum;
}
