// Router logits of a few tokens, and the logit of the shared expert's gate: a row of the router a warp. HIDDEN,
// EXPERTS, CHOICES; ACTIVATION: bf16 or float; TOKENS: at most so many a block; VECTORS: rows start at multiples of
// 16 bytes.
#include "moe/routing.cuh"

constexpr int WARPS = 4;
constexpr int PER_VECTOR = 16 / sizeof(ACTIVATION);
constexpr int STRIDE = WARP * (VECTORS ? PER_VECTOR : 1), STEPS = ceil_div(HIDDEN, STRIDE);

// What a lane has of a row: 16 bytes, or one element, every STRIDE elements.
struct LaneRow {
  uint4 vectors[VECTORS ? STEPS : 1];
  const ACTIVATION* row;

  __device__ __forceinline__ LaneRow(const ACTIVATION* from) : row(from) {
    if constexpr (VECTORS) {
#pragma unroll
      for (int i = 0; i < STEPS; ++i) {
        int column = i * STRIDE + threadIdx.x % WARP * PER_VECTOR;
        vectors[i] = column < HIDDEN ? load_streaming(row + column) : make_uint4(0, 0, 0, 0);
      }
    }
  }

  __device__ __forceinline__ float dot(const ACTIVATION* x) const {
    float sum = 0.f;
    if constexpr (VECTORS) {
#pragma unroll
      for (int i = 0; i < STEPS; ++i) {
        int column = i * STRIDE + threadIdx.x % WARP * PER_VECTOR;
        uint4 other = column < HIDDEN ? *reinterpret_cast<const uint4*>(x + column) : make_uint4(0, 0, 0, 0);
        const uint32 mine[4] = {vectors[i].x, vectors[i].y, vectors[i].z, vectors[i].w};
        const uint32 its[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          if constexpr (PER_VECTOR == 8)
            sum += low_bf16(mine[word]) * low_bf16(its[word]) + high_bf16(mine[word]) * high_bf16(its[word]);
          else
            sum += bits_to_float(mine[word]) * bits_to_float(its[word]);
        }
      }
    } else {
      for (int column = threadIdx.x % WARP; column < HIDDEN; column += STRIDE)
        sum += to_float(row[column]) * to_float(x[column]);
    }
    return warp_sum(sum);
  }
};

extern "C" __global__ void __launch_bounds__(WARPS * WARP)
router_logits(const ACTIVATION* x, const ACTIVATION* router, const ACTIVATION* shared_gate, float* logits,
              int first_token, int tokens) {
  const int row = blockIdx.x * WARPS + threadIdx.x / WARP;
  LaneRow weights(row < EXPERTS ? router + int64(row) * HIDDEN : shared_gate);
  start_next();
  wait_for_previous();
  if (row > EXPERTS) return;
  const int first = blockIdx.y * TOKENS, end = min(tokens, first + TOKENS);
  for (int token = first; token < end; ++token) {
    float logit = weights.dot(x + int64(first_token + token) * HIDDEN);
    if (threadIdx.x % WARP == 0) logits[int64(token) * LOGITS_PITCH + row] = logit;
  }
}
