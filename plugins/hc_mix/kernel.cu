// The gated mean of the normed streams, a thread for each vector of columns.
// HIDDEN: elements of a stream; STREAMS; ACTIVATION: bf16 or float.
#include "hc_norm/vectors.cuh"

constexpr int VECTOR = vector_of<ACTIVATION>(HIDDEN), ITEMS = HIDDEN / VECTOR;
constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
hc_mix(const ACTIVATION* gate_logits, const ACTIVATION* normed, ACTIVATION* mixed, int tokens) {
  const int64 item = int64(blockIdx.x) * THREADS + threadIdx.x;
  const int64 token = item / ITEMS, column = item % ITEMS * VECTOR;
  start_next();
  wait_for_previous();
  if (token >= tokens) return;
  float sum[VECTOR] = {}, logits[STREAMS][VECTOR], values[STREAMS][VECTOR];
#pragma unroll
  for (int stream = 0; stream < STREAMS; ++stream) {
    int64 at = (token * STREAMS + stream) * HIDDEN + column;
    load_floats(gate_logits + at, logits[stream]);
    load_floats(normed + at, values[stream]);
  }
#pragma unroll
  for (int stream = 0; stream < STREAMS; ++stream)
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) sum[j] += sigmoid(logits[stream][j]) * values[stream][j];
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) sum[j] /= STREAMS;
  store_floats(mixed + token * HIDDEN + column, sum);
}
