// Names the winner of a race, and counts the raw logits above that of the sampled token where no kernel before could.
#include "sample_tokens/row.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
rank(const ACTIVATION* raw_logits, const ChunkStats* chunks, const RowState* states, const uint64* winners,
     int* token_ids, float* logprobs, int* ranks, int vocab_size, int num_ids) {
  const int row = blockIdx.y;
  const int64 start = int64(row) * vocab_size;
  wait_for_previous();
  start_next();
  const Stage stage = Stage(states[row].stage);
  if (stage == DONE) return;
  int token = 0;
  if (stage == RACE) {
    uint64 best = 0;
    for (int i = threadIdx.x % WARP; i < gridDim.x; i += WARP) best = max(best, winners[int64(row) * gridDim.x + i]);
    token = ranked_id(warp_best(best));
  } else {
    token = token_ids[row];
  }
  const float raw = to_float(raw_logits[start + token]);
  if (stage == RACE && blockIdx.x == 0) {
    const RowStats stats = merge_stats(chunks + int64(row) * gridDim.x, gridDim.x);
    if (threadIdx.x == 0) token_ids[row] = token, logprobs[row] = raw - stats.log_sum;
  }
  uint32 above = 0;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int id = blockIdx.x * CHUNK + i * THREADS + threadIdx.x;
    above += id < num_ids && to_float(raw_logits[start + id]) > raw;
  }
  above = __reduce_add_sync(FULL_MASK, above);
  if (threadIdx.x % WARP == 0 && above > 0) atomicAdd(&ranks[row], int(above));
}
