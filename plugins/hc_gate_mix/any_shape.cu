// The up projection with the gated mean of the streams, for shapes and dtypes that tensor cores do not take: a warp for
// each column of each token. HIDDEN: columns of a stream; STREAMS; RANK; ACTIVATION: bf16 or float.
#include "q4e.cuh"

constexpr int WARPS = 8;

extern "C" __global__ void __launch_bounds__(WARPS * WARP)
hc_gate_mix_any_shape(const ACTIVATION* lowrank, const ACTIVATION* up_weight, const ACTIVATION* normed,
                      ACTIVATION* mixed) {
  const int64 token = blockIdx.x;
  const int column = blockIdx.y * WARPS + threadIdx.x / WARP;
  start_next();
  wait_for_previous();
  if (column >= HIDDEN) return;
  float sum = 0.f;
  for (int stream = 0; stream < STREAMS; ++stream) {
    const int64 row = int64(stream) * HIDDEN + column;
    float logit = 0.f;
    for (int i = threadIdx.x % WARP; i < RANK; i += WARP)
      logit += to_float(lowrank[token * RANK + i]) * to_float(up_weight[row * RANK + i]);
    logit = round_to<ACTIVATION>(warp_sum(logit));
    sum += sigmoid(logit) * to_float(normed[token * STREAMS * HIDDEN + row]);
  }
  if (threadIdx.x % WARP == 0) mixed[token * HIDDEN + column] = from_float<ACTIVATION>(sum / STREAMS);
}
