// Decides what a row needs; answers greedy and unusable ones. For rows with filters: how many tokens each bin of
// distances has, and with top-p alone their mass.
#include "sample_tokens/filter.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
histogram(const ACTIVATION* logits, const ACTIVATION* raw_logits, const float* temperatures, const int* top_k,
          const float* top_p, const float* min_p, const ChunkStats* chunks, RowState* states, RowCounters* counters,
          int* token_ids, float* logprobs, int* ranks, int vocab_size, int num_ids) {
  __shared__ uint64 mass[BINS];
  __shared__ uint32 counts[BINS];
  const int row = blockIdx.y;
  const int64 start = int64(row) * vocab_size;
  wait_for_previous();
  start_next();
  const float temperature = temperatures[row];
  const Filters filters = load_filters(top_k, top_p, min_p, row, num_ids);
  const RowStats stats = merge_stats(chunks + int64(row) * gridDim.x, gridDim.x);
  const bool is_greedy = !(temperature > 0.f), is_filtered = stats.usable && !is_greedy && filters.drop_something();
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    const bool is_final = !stats.usable || is_greedy;
    token_ids[row] = stats.usable ? stats.best_id : -1;
    logprobs[row] = stats.usable ? to_float(raw_logits[start + stats.best_id]) - stats.log_sum : 0.f;
    ranks[row] = stats.usable;
    const Stage after_greedy = stats.usable && logits != raw_logits ? RANK : DONE;
    states[row] = {is_final ? after_greedy : is_filtered ? FILTER : RACE, -negative_infinity()};
  }
  if (!is_filtered) return;

  for (int bin = threadIdx.x; bin < BINS; bin += THREADS) counts[bin] = 0, mass[bin] = 0;
  __syncthreads();
  const Scale scale = {stats.best, temperature};
  const bool needs_mass = filters.only_top_p();
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int id = blockIdx.x * CHUNK + i * THREADS + threadIdx.x;
    const float distance = id < num_ids ? scale.distance(logits[start + id]) : -negative_infinity();
    const int bin = bin_of(distance);
    if (bin >= BINS) continue;
    atomicAdd(&counts[bin], 1u);
    if (needs_mass) atomicAdd(&mass[bin], mass_of(distance));
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < BINS; bin += THREADS) {
    if (counts[bin] == 0) continue;
    atomicAdd(&counters[row].counts[bin], counts[bin]);
    if (needs_mass) atomicAdd(&counters[row].mass[bin], mass[bin]);
  }
}
