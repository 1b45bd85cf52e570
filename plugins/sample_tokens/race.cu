// The best of each chunk's tokens with their noise, for rows of which many tokens may be sampled.
#include "sample_tokens/row.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
race(const ACTIVATION* logits, const float* temperatures, const int64* seeds, const int* offsets,
     const ChunkStats* chunks, const RowState* states, uint64* winners, int vocab_size, int num_ids) {
  const int row = blockIdx.y;
  wait_for_previous();
  start_next();
  const RowState state = states[row];
  if (state.stage != RACE) return;
  const RowStats stats = merge_stats(chunks + int64(row) * gridDim.x, gridDim.x);
  const Scale scale = {stats.best, temperatures[row]};
  const uint64 seed = seeds[row];
  const int offset = offsets[row];
  uint64 best = 0;
  for (int i = 0; i < ITEMS; ++i) {
    const int id = blockIdx.x * CHUNK + i * THREADS + threadIdx.x;
    if (id >= num_ids) break;
    const float distance = scale.distance(logits[int64(row) * vocab_size + id]);
    if (distance <= state.furthest) best = max(best, ranked(race_score(distance, seed, offset, id), id));
  }
  best = block_best(best);
  if (threadIdx.x == 0) winners[int64(row) * gridDim.x + blockIdx.x] = best;
}
