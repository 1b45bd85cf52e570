// Router logits of many tokens on tensor cores, and the logits of the shared expert's gate. A block takes 16 rows of
// the router and GROUP tokens, and its warps share the elements of x among them; the last block of a group takes the
// gate. HIDDEN, EXPERTS, CHOICES; WARPS; GROUP: a multiple of 8; STEPS_AHEAD: of `RowTiles`.
#include "moe/routing.cuh"
#include "moe/tiles.cuh"

constexpr int THREADS = WARPS * WARP, N = GROUP / 8;

__device__ __forceinline__ float dot(const bf16* a, const bf16* b) {
  float sum = 0.f;
  for (int column = threadIdx.x % WARP * 2; column < HIDDEN; column += 2 * WARP) {
    uint32 x = *reinterpret_cast<const uint32*>(a + column), y = *reinterpret_cast<const uint32*>(b + column);
    sum += low_bf16(x) * low_bf16(y) + high_bf16(x) * high_bf16(y);
  }
  return warp_sum(sum);
}

extern "C" __global__ void __launch_bounds__(THREADS)
router_tiles(const bf16* x, const bf16* router, const bf16* shared_gate, float* logits, int first_token, int tokens) {
  constexpr int STEPS = HIDDEN / Bf16::STEP / WARPS;
  static_assert(HIDDEN % (Bf16::STEP * WARPS) == 0, "as many steps for every warp");
  __shared__ float parts[WARPS][16][GROUP];
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, row = blockIdx.x * 16;
  const int first = blockIdx.y * GROUP, count = min(GROUP, tokens - first);
  x += int64(first_token + first) * HIDDEN, logits += int64(first) * LOGITS_PITCH;
  if (row >= EXPERTS) {
    wait_for_previous();
    start_next();
    for (int token = warp; token < count; token += WARPS) {
      float logit = dot(shared_gate, x + int64(token) * HIDDEN);
      if (lane == 0) logits[int64(token) * LOGITS_PITCH + EXPERTS] = logit;
    }
    return;
  }
  const int lane_row = row + lane / 4;
  RowTiles<Bf16, HIDDEN, 1, 16, STEPS, STEPS_AHEAD> tiles({router, nullptr, nullptr}, lane_row, lane_row + 8,
                                                          warp * STEPS);
  wait_for_previous();
  start_next();
  const bf16* rows[N];
#pragma unroll
  for (int n = 0; n < N; ++n) rows[n] = x + int64(min(8 * n + lane / 4, count - 1)) * HIDDEN;
  float sums[1][N][4];
  tiles.multiply<false, true>(rows, sums);
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) parts[warp][lane / 4 + 8 * (i / 2)][8 * n + lane % 4 * 2 + i % 2] = sums[0][n][i];
  __syncthreads();
  for (int i = threadIdx.x; i < 16 * count; i += THREADS) {
    float sum = 0.f;
#pragma unroll
    for (int part = 0; part < WARPS; ++part) sum += parts[part][i % 16][i / 16];
    logits[int64(i / 16) * LOGITS_PITCH + row + i % 16] = sum;
  }
}
