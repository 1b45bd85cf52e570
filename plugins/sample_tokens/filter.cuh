// min-p, top-k and top-p over distances (see `Scale`): bins, and probability mass in fixed point, so no sum depends
// on an order.
#pragma once
#include "sample_tokens/row.cuh"

constexpr int BINS = 1408, MAX_CANDIDATES = 2048;

struct RowCounters {  // of 32-bit words that `stats` zeroes
  uint64 mass[BINS];
  uint32 counts[BINS];
  uint32 num_candidates, unused;
};

// 128 bins for each power of two of the distance and 2^-6. A distance from 32 on is in none: such a token has less than
// 1e-13 of the best one's mass, and its noise can never make up for it.
__device__ __forceinline__ int bin_of(float distance) {
  return distance < 32.f ? int((__float_as_uint(distance + 0x1p-6f) - 0x3c800000u) >> 16) : BINS;
}
// exp(-distance) in units of 2^-44; a whole vocabulary's fits 64 bits.
__device__ __forceinline__ uint64 mass_of(float distance) { return uint64(expf(-distance) * 0x1p44f); }

struct Filters {
  int top_k;    // 0: off
  float top_p;  // 1: off
  float floor;  // the largest distance that min-p keeps, infinite: off

  __device__ __forceinline__ bool has_floor() const { return floor < -negative_infinity(); }
  __device__ __forceinline__ bool drop_something() const { return top_k > 0 || top_p < 1.f || has_floor(); }
  __device__ __forceinline__ bool only_top_p() const { return top_k == 0 && !has_floor(); }
  // What the mass in front of a token must stay below, of `total`.
  __device__ __forceinline__ uint64 mass_limit(uint64 total) const {
    return top_p < 1.f ? uint64(ceil(double(top_p) * double(total))) : ~uint64(0);
  }
};

__device__ __forceinline__ Filters load_filters(const int* top_k, const float* top_p, const float* min_p, int row,
                                                int num_ids) {
  const int k = top_k[row];
  const float floor = min_p[row];
  return {k > 0 && k < num_ids ? k : 0, top_p[row], floor > 0.f ? -logf(floor) : -negative_infinity()};
}

// The sum of `x` over the threads in front of this one, and over all.
struct Scanned {
  uint64 before, total;
};
__device__ __forceinline__ Scanned block_scan(uint64 x) {
  __shared__ uint64 partial[WARPS];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const uint64 sum = warp_prefix(x);
  __syncthreads();  // of a call before this one
  if (lane == WARP - 1) partial[warp] = sum;
  __syncthreads();
  Scanned scanned = {sum - x, 0};
#pragma unroll
  for (int i = 0; i < WARPS; ++i) {
    if (i < warp) scanned.before += partial[i];
    scanned.total += partial[i];
  }
  return scanned;
}

// Sums over N bins in order.
template <int N, typename Value>
struct BinScan {
  static constexpr int OWN = ceil_div(N, THREADS);
  const Value* bins;
  uint64 own;
  Scanned scanned;

  __device__ __forceinline__ explicit BinScan(const Value* values) : bins(values), own(0) {
#pragma unroll
    for (int i = 0; i < OWN; ++i) own += OWN * threadIdx.x + i < N ? bins[OWN * threadIdx.x + i] : 0;
    scanned = block_scan(own);
  }
  // The bin with which the sum reaches `target`, the last one if none does; every thread gets it.
  __device__ __forceinline__ int reaching(uint64 target) const {
    __shared__ int found;
    if (threadIdx.x == 0) found = N - 1;
    __syncthreads();
    uint64 sum = scanned.before;
    if (sum < target && target <= sum + own) {
      int bin = OWN * threadIdx.x;
      for (; sum + bins[bin] < target; ++bin) sum += bins[bin];
      found = bin;
    }
    __syncthreads();
    return found;
  }
};
