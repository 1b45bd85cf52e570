// What the kernels of the sampler share: a row is read in chunks of CHUNK ids, and goes from kernel to kernel as a
// `RowState`. Macro: ACTIVATION: bf16 or float.
#pragma once
#include "q4e.cuh"

constexpr int THREADS = 256, WARPS = THREADS / WARP;
constexpr int CHUNK = 2048, ITEMS = CHUNK / THREADS;
constexpr int AHEAD = 4;  // loads of a thread that are under way together

// --- scratch ----------------------------------------------------------------------------------------------------

struct __align__(16) ChunkStats {
  float best;     // of the logits that may be sampled
  int best_id;    // the lowest that has it
  float raw_max;  // of all raw logits; NaN if one is NaN or +inf
  float raw_sum;  // of exp(raw - raw_max)
};

// What is left to do for a row.
enum Stage : int {
  DONE,    // nothing: its outputs are written
  FILTER,  // find the lowest logit that the filters keep, and take part in the race if they keep few
  RACE,    // give every kept token its noise and take the best
  RANK,    // count the raw logits above that of the token in `token_ids`
};
struct RowState {
  int stage;
  float furthest;  // RACE: the largest distance (see `Scale`) that is kept
};

// --- order ------------------------------------------------------------------------------------------------------

// (value, id) as one number: the larger the better, of equal values the lower id. -0 equals 0.
__device__ __forceinline__ uint64 ranked(float value, int id) {
  const uint32 bits = __float_as_uint(value + 0.f);
  const uint32 ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return uint64(ordered) << 32 | uint32(~id);
}
__device__ __forceinline__ int ranked_id(uint64 x) { return int(~uint32(x)); }
__device__ __forceinline__ float ranked_value(uint64 x) {
  const uint32 ordered = uint32(x >> 32);
  return __uint_as_float(ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered);
}

__device__ __forceinline__ uint64 warp_best(uint64 x) {
#pragma unroll
  for (int lane = WARP / 2; lane > 0; lane /= 2) x = max(x, __shfl_xor_sync(FULL_MASK, x, lane));
  return x;
}
// Of all threads of the block; every thread gets it.
__device__ __forceinline__ uint64 block_best(uint64 x) {
  __shared__ uint64 partial[WARPS];
  x = warp_best(x);
  __syncthreads();  // of a call before this one
  if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = x;
  __syncthreads();
  x = partial[0];
#pragma unroll
  for (int warp = 1; warp < WARPS; ++warp) x = max(x, partial[warp]);
  return x;
}

// --- what is known of a row behind `stats` ----------------------------------------------------------------------

struct RowStats {
  float best;
  int best_id;
  float log_sum;  // of exp of all raw logits
  bool usable;
};

// By every warp for itself, in an order that depends on the number of chunks alone.
__device__ __forceinline__ RowStats merge_stats(const ChunkStats* chunks, int num_chunks) {
  const int lane = threadIdx.x % WARP;
  uint64 best = 0;
  float maximum = negative_infinity(), sum = 0.f;
  bool bad = false;
#pragma unroll 1
  for (int first = lane; first < num_chunks; first += AHEAD * WARP) {
    ChunkStats read[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      read[i] = first + i * WARP < num_chunks ? chunks[first + i * WARP] : ChunkStats{0.f, 0, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const ChunkStats& chunk = read[i];
      if (first + i * WARP < num_chunks) best = max(best, ranked(chunk.best, chunk.best_id));
      bad |= chunk.raw_max != chunk.raw_max;
      if (chunk.raw_sum > 0.f) {
        const float above = fmaxf(maximum, chunk.raw_max);
        sum = sum * expf(maximum - above) + chunk.raw_sum * expf(chunk.raw_max - above);
        maximum = above;
      }
    }
  }
  best = warp_best(best);
  const float top = warp_max(maximum);
  sum = warp_sum(sum > 0.f ? sum * expf(maximum - top) : 0.f);
  const bool usable = !__any_sync(FULL_MASK, bad) && sum > 0.f && ranked_value(best) > negative_infinity();
  return {ranked_value(best), ranked_id(best), top + logf(sum), usable};
}

// Distances from the best logit in units of the temperature: 0 for the best, larger for worse.
struct Scale {
  float best, temperature;
  __device__ __forceinline__ float distance(ACTIVATION logit) const { return (best - to_float(logit)) / temperature; }
};

// --- noise ------------------------------------------------------------------------------------------------------

// noise.py in CUDA: standard exponential noise of a token of draw `offset`.
__device__ __forceinline__ float exponential_noise(uint64 seed, int offset, int id) {
  uint32 a = uint32(id) / 4, b = uint32(offset), c = 0, d = 0, k = uint32(seed), l = uint32(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32 first = __umulhi(0xD2511F53u, a), second = __umulhi(0xCD9E8D57u, c);
    const uint32 next_b = 0xCD9E8D57u * c, next_d = 0xD2511F53u * a;
    a = second ^ b ^ k, c = first ^ d ^ l, b = next_b, d = next_d;
    k += 0x9E3779B9u, l += 0xBB67AE85u;
  }
  const uint32 word = id % 4 == 0 ? a : id % 4 == 1 ? b : id % 4 == 2 ? c : d;
  const float uniform = fminf((float(word) + 0.5f) * 0x1p-32f, 1.f - 0x1p-24f);
  return -log1pf(-uniform);
}
// What a token has in the race: the largest wins.
__device__ __forceinline__ float race_score(float distance, uint64 seed, int offset, int id) {
  return -distance - logf(exponential_noise(seed, offset, id));
}
