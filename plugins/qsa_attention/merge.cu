// Joins the splits of one query head and applies the output gate; a block has 64 columns of it. Threads of a slice have
// four places of a part each; slices share the splits.
// Macros: HEAD_DIM, HQ, HKV, ACTIVATION: bf16 or float.
#include "qsa_attention/parts.cuh"

constexpr int MAX_THREADS = 256;
constexpr int QUARTERS = SLAB / 4;        // float4 of a part
constexpr int AHEAD = 9, SUMS_AHEAD = 4;  // loads of a thread that are under way together

__device__ __forceinline__ void load_parts(float4 parts[AHEAD], const float4* from, int split, int num_splits,
                                           int slices) {
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    const int at = split + i * slices;
    parts[i] = at < num_splits ? __ldcg(from + int64(at) * (PART_WIDTH / 4)) : make_float4(0.f, 0.f, 0.f, 0.f);
  }
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS)
merge(const float* partial_out, const float2* partial_sums, const ACTIVATION* qkv, const int* query_start_loc,
      const int* num_seqs, ACTIVATION* out, int num_splits, int slices) {
  DYNAMIC_SHARED(float4, sums);                                          // of the slices
  float* weights = reinterpret_cast<float*>(sums + slices * QUARTERS);  // of the splits
  const int slab = blockIdx.x % (PART_WIDTH / SLAB), lane = threadIdx.x % WARP;
  const int64 row_head = blockIdx.x / (PART_WIDTH / SLAB);
  const int token = int(row_head / HQ), head = int(row_head % HQ);
  const int quarter = threadIdx.x % QUARTERS, slice = threadIdx.x / QUARTERS;
  const bool is_real = token < query_start_loc[*num_seqs];
  const int column = slab * SLAB + threadIdx.x;  // of the output
  const bool has_column = threadIdx.x < SLAB && column < HEAD_DIM;
  const ACTIVATION* gates = qkv + (int64(token) * (2 * HQ + 2 * HKV) + 2 * head + 1) * HEAD_DIM;
  const float gate = has_column ? to_float(gates[column]) : 0.f;
  wait_for_previous();
  start_next();
  if (!is_real) return;

  const float2* pairs = partial_sums + row_head * num_splits;
  const float4* from =
      reinterpret_cast<const float4*>(partial_out + row_head * num_splits * PART_WIDTH + slab * SLAB) + quarter;
  float4 parts[AHEAD];
  if (slice < slices) load_parts(parts, from, slice, num_splits, slices);
  // Every warp finds the maximum and the sum for itself; the sum first in units of the lane's own maximum.
  float own_maximum = negative_infinity(), sum = 0.f;
#pragma unroll 1
  for (int first = 0; first < num_splits; first += SUMS_AHEAD * WARP) {
    float2 read[SUMS_AHEAD];
#pragma unroll
    for (int i = 0; i < SUMS_AHEAD; ++i) {
      const int split = first + i * WARP + lane;
      read[i] = split < num_splits ? __ldcg(pairs + split) : float2{negative_infinity(), 0.f};
    }
#pragma unroll
    for (int i = 0; i < SUMS_AHEAD; ++i) {
      const int split = first + i * WARP + lane;
      const float best = fmaxf(own_maximum, read[i].x);
      if (read[i].y > 0.f) sum = sum * exp2_approx(own_maximum - best) + read[i].y * exp2_approx(read[i].x - best);
      own_maximum = best;
      if (threadIdx.x < WARP && split < num_splits) weights[split] = read[i].x;  // the maximum, for now
    }
  }
  const float maximum = warp_max(own_maximum);
  sum = warp_sum(sum > 0.f ? sum * exp2_approx(own_maximum - maximum) : 0.f);
#pragma unroll 1
  for (int split = threadIdx.x; split < num_splits && threadIdx.x < WARP; split += WARP)
    weights[split] = weights[split] == negative_infinity() ? 0.f : exp2_approx(weights[split] - maximum);
  __syncthreads();

  float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
  for (int split = slice; slice < slices && split < num_splits; split += AHEAD * slices) {
    if (split != slice) load_parts(parts, from, split, num_splits, slices);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int at = split + i * slices;
      const float weight = at < num_splits ? weights[at] : 0.f;
      if (weight == 0.f) continue;  // a split without tokens has written no output: what stands there may be NaN
      total.x += weight * parts[i].x, total.y += weight * parts[i].y;
      total.z += weight * parts[i].z, total.w += weight * parts[i].w;
    }
  }
  if (slice < slices) sums[slice * QUARTERS + quarter] = total;
  __syncthreads();
  if (!has_column) return;
  const float* places = reinterpret_cast<const float*>(sums) + part_place(threadIdx.x);
  float value = 0.f;
#pragma unroll 4
  for (int other = 0; other < slices; ++other) value += places[other * SLAB];
  const float gated = sum > 0.f ? __fdividef(value, sum * (1.f + __expf(-gate))) : 0.f;
  out[row_head * HEAD_DIM + column] = from_float<ACTIVATION>(gated);
}
