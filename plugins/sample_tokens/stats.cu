// Best logit, and maximum and sum of the raw ones, of each chunk of a row; zeroes what later kernels count in.
#include "sample_tokens/row.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
stats(const ACTIVATION* logits, const ACTIVATION* raw_logits, ChunkStats* chunks, uint32* counters, int num_counters,
      int vocab_size, int num_ids) {
  const int first = blockIdx.x * CHUNK + threadIdx.x;
  const int64 row = blockIdx.y;
  wait_for_previous();
  start_next();
  float raw[ITEMS], values[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int id = first + i * THREADS;
    raw[i] = id < vocab_size ? to_float(raw_logits[row * vocab_size + id]) : negative_infinity();
    values[i] = raw[i];
  }
  if (logits != raw_logits) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int id = first + i * THREADS;
      values[i] = id < num_ids ? to_float(logits[row * vocab_size + id]) : negative_infinity();
    }
  }
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < num_counters; i += gridDim.x * THREADS)
    counters[row * num_counters + i] = 0;

  bool bad = false;
  uint64 best = 0, raw_best = 0;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int id = first + i * THREADS;
    bad |= !(raw[i] < -negative_infinity());
    raw_best = max(raw_best, ranked(raw[i], 0));
    best = max(best, ranked(id < num_ids ? values[i] : negative_infinity(), id));
  }
  best = block_best(best);
  const float maximum = ranked_value(block_best(raw_best));
  bad = __syncthreads_or(bad);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) sum += raw[i] == negative_infinity() ? 0.f : expf(raw[i] - maximum);
  sum = block_sum<THREADS>(sum);
  if (threadIdx.x == 0)
    chunks[row * gridDim.x + blockIdx.x] = {ranked_value(best), ranked_id(best),
                                            bad ? __uint_as_float(0x7fffffffu) : maximum, sum};
}
